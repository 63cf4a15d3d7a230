"""The loop: steps in data order, and between them evaluation, checkpoints, early stopping and signals.

It does not know what it trains. Whatever ends it - the last step, a signal, no gain - a complete checkpoint is left.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from finetune.checkpoint import store
from finetune.contracts import StepResult
from finetune.data.prefetch import Loaded, Prefetch, load
from finetune.generate.evaluate import Evaluator
from finetune.generate.scores import scores
from finetune.telemetry import memory
from finetune.telemetry.log import StepProgress
from finetune.telemetry.metrics import Metrics
from finetune.train import state
from finetune.train.job import Job, StopAskedError
from finetune.train.probe import longest_rows, probe, wanted
from finetune.train.recovery import memory_named, taken_back
from finetune.train.step import train_step


@dataclass(frozen=True)
class Loop:
    """Runs a job from its progress to `steps`. `metrics` is None on ranks other than 0."""

    job: Job
    evaluator: Evaluator
    metrics: Metrics | None
    steps: int

    def run(self) -> None:
        """Trains to the end. Raises StoppedError after saving when a signal came."""
        job = self.job
        try:
            if job.progress.step == 0 and job.splits.evaluate and not job.progress.eval_before:
                job.progress.eval_before = self.evaluate(answers=True)
            self._train()
        except StopAskedError as asked:
            raise state.stopped(job, str(asked), self._save()) from None
        job.progress.complete = True
        self._save()

    def _train(self) -> None:
        job = self.job
        job.model.module.train()
        job.peaks.enter("step")
        if job.progress.step and (self._evaluate_if_due() or self._save_is_due) and not self._ended:
            # What follows this step was cut off by what stopped the run, or by too little memory.
            self._save()
        if wanted(job) and not self._ended:
            self._probe()
        with StepProgress(job.log, self.steps, job.progress.step) as bar, ahead(job, self.steps) as steps:
            for loaded in steps:
                result = self._step(loaded)
                self._record(result, loaded.epoch, loaded.end)
                self._watch(result, loaded.rows)
                bar.step(result, memory.shown_bytes(job.world.device))
                self._between_steps()
                if self._ended:
                    break

    @property
    def _ended(self) -> bool:
        return self.job.progress.ended(self.steps, self.job.recipe.train.stop_after)

    def _probe(self) -> None:
        job, rows = self.job, longest_rows(self.job)
        longest = int(job.splits.train.lengths[rows[0]])
        with memory_named(f"a trial of the longest rows before the first step ({longest} tokens; rows {rows[:8]})"):
            probe(job, rows)

    def _step(self, loaded: Loaded) -> StepResult:
        job = self.job
        with taken_back(job), memory_named(f"step {job.progress.step + 1} with rows {loaded.rows[:8].tolist()}"):
            return train_step(job, loaded.rows.tolist(), self.steps, loaded)

    def _record(self, result: StepResult, epoch: int, end: int) -> None:
        job, progress = self.job, self.job.progress
        progress.step, progress.epoch, progress.row = result.step, epoch, end
        progress.tokens += result.tokens
        progress.seconds += result.seconds
        if not result.skipped:
            progress.loss_last = result.loss
            if progress.loss_first is None:
                progress.loss_first = result.loss
        if self.metrics is not None:
            self.metrics.write(
                {
                    "step": result.step,
                    "loss": result.loss,
                    "tokens": result.tokens,
                    "trained_tokens": result.trained_tokens,
                    "lr": result.lr,
                    "grad_norm": result.grad_norm,
                    "seconds": round(result.seconds, 6),
                    "tokens_per_s": round(result.tokens / result.seconds, 3),
                    "peak_gpu_bytes": job.peaks.of("step"),
                    "host_bytes": memory.host_bytes(),
                    "data_wait": round(result.data_wait, 6),
                    **self._scaling(result),
                }
            )

    def _scaling(self, result: StepResult) -> dict[str, float]:
        """fp16's figures: the scale that the step was made with, and how many steps were skipped so far."""
        scale = self.job.scale
        if scale is None or result.loss_scale is None:
            return {}
        return {"loss_scale": result.loss_scale, "skipped_steps": scale.skipped}

    def _watch(self, result: StepResult, rows: np.ndarray) -> None:
        """Tells what the step's figures say of the run's health."""
        job = self.job
        if result.skipped and job.scale is not None:
            job.log.notice(
                f"step {result.step}: overflow in fp16, skipped ({job.scale.skipped} so far); the loss scale is now "
                f"{job.scale.scale:g}"
            )
            return
        spike = job.health.spike(result.step, result.loss, rows.tolist())
        if spike:
            job.log.warn(spike)

    def _between_steps(self) -> None:
        """Evaluates and saves where it is time. What ends the run is left to be saved when it is over."""
        step = self.job.progress.step
        improved = self._evaluate_if_due()
        if self._ended:
            if step < self.steps:
                limit = self.job.recipe.train.stop_after
                self.job.log.notice(f"stopped at step {step}: {limit} evaluations without a lower eval_loss")
        elif improved or self._save_is_due:
            self._save()

    @property
    def _save_is_due(self) -> bool:
        """Whether this step's checkpoint is one that the recipe asks for and is not there yet."""
        every, progress = self.job.recipe.checkpoint.every, self.job.progress
        there = progress.saved is not None and store.step_of(progress.saved) == progress.step
        return every is not None and progress.step % every == 0 and not there

    def _save(self) -> Path:
        with memory_named(f"the checkpoint after step {self.job.progress.step}"):
            return state.save(self.job)

    def _evaluate_if_due(self) -> bool:
        """Evaluates this step, if it is one of those and was not yet; True when its checkpoint is to be kept as the best."""
        job, step = self.job, self.job.progress.step
        every = job.recipe.evaluate.every
        due = step >= self.steps or (every is not None and step % every == 0)
        if not job.splits.evaluate or not due or job.progress.evaluated == step:
            return False
        figures = self.evaluate(answers=step >= self.steps)
        job.progress.eval_last, job.progress.evaluated = figures, step
        return self._note_best(figures)

    def _note_best(self, figures: dict[str, float]) -> bool:
        """Updates what early stopping and keep_best go by; True when the checkpoint of this step is to be kept as best."""
        progress = self.job.progress
        loss = figures.get("eval_loss")
        if loss is not None and loss < (math.inf if progress.lowest is None else progress.lowest):
            progress.lowest, progress.evaluations_without_gain = loss, 0
        else:
            progress.evaluations_without_gain += 1
        metric = self.job.recipe.checkpoint.keep_best
        if metric is None or not figures[metric] < (math.inf if progress.best is None else progress.best):
            return False
        progress.best, progress.best_step = figures[metric], progress.step
        return True

    def evaluate(self, answers: bool = False) -> dict[str, float]:
        """The evaluation figures now, printed and written to the metrics; with `answers` the scores of answers too."""
        job = self.job
        started = time.perf_counter()
        with (
            job.peaks.during("evaluate"),
            memory_named(f"the evaluation after step {job.progress.step}"),
            job.update.visiting(),
        ):
            figures = self.evaluator.losses(job.splits.evaluate)
            if answers:
                figures |= scores(job.model, job.splits.evaluate, job.recipe, job.precision, job.world)
        shown = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
        rows = ", ".join(f"{len(rows.documents)} held-out documents" for rows in job.splits.evaluate.values())
        job.log.say(f"step {job.progress.step}  {shown}  ({rows}, {time.perf_counter() - started:.1f} s)")
        if self.metrics is not None:
            self.metrics.write({"step": job.progress.step, **figures})
        return figures


def ahead(job: Job, steps: int) -> Prefetch:
    """The steps that are left, each with its batches made ahead."""
    share = (job.world.rank, job.world.size, job.plan.micro_batch)
    left = 0 if job.progress.ended(steps, job.recipe.train.stop_after) else steps - job.progress.step
    return Prefetch(
        islice(upcoming(job), left), lambda step: load(step, job.splits.train, job.task, share), job.world.device
    )


def upcoming(job: Job) -> Iterator[tuple[int, int, np.ndarray]]:
    """The steps' rows from the job's position on, without end: (epoch, rows of it consumed after the step, row ids)."""
    epoch, row = job.progress.epoch, job.progress.row
    while True:
        for rows, after in job.order.steps(epoch, row):
            yield epoch, after, rows
        epoch, row = epoch + 1, 0
