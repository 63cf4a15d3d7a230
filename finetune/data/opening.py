"""A recipe's data for a run: from the cache where they were prepared before, else prepared and kept, once for all ranks.

Rank 0 prepares while the others wait; then each maps the same files. Whatever stops rank 0 stops them all with its
message. Where a rank cannot see rank 0's files (another machine), it prepares its own, one process a machine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from finetune.config.schema import Recipe
from finetune.data import cache
from finetune.data.cache_limit import make_room, size
from finetune.data.dataset import evaluation_paths, evaluation_sets, make_splits, renderer_of
from finetune.data.files import check_regular
from finetune.data.loader import Order
from finetune.data.mixture import counted, mixture_of
from finetune.data.preflight import check
from finetune.data.preparation import Tell, silent
from finetune.data.rows import RowSet, Splits
from finetune.data.sources import files_of, load_records
from finetune.data.streaming import StreamOrder, StreamRows, stream
from finetune.data.templates import load_template
from finetune.environment import cache_folder, cache_limit
from finetune.errors import DataError, InputError
from finetune.machine.collectives import World
from finetune.machine.waiting import first_alone, in_own_time

ALONE = World(0, 1, torch.device("cpu"))
NOT_IN_ROWS = ("cache", "workers", "weights", "on_exhausted", "shuffle_buffer")
"""Keys of data that change how rows are made or drawn, and no row."""


def open_data(recipe: Recipe, tokenizer: Any, world: World = ALONE, tell: Tell = silent, strict: bool = True) -> Splits:
    """All splits of a recipe, the same on every rank. `tell` is given a line on what was reused, made, kept or broken.

    Raises as dataset.prepare does, on every rank alike.
    """
    return _same_everywhere(_opened(recipe, tokenizer, world, tell, strict), world)


def _opened(recipe: Recipe, tokenizer: Any, world: World, tell: Tell, strict: bool) -> Splits:
    if recipe.data.streaming:
        return in_own_time(world, "data", lambda: _checked(_streamed(recipe, tokenizer, tell), recipe, strict))
    if not recipe.data.cache:
        return in_own_time(world, "data", lambda: _checked(make_splits(recipe, tokenizer, tell), recipe, strict))
    own: list[Splits] = []

    def make() -> str:
        entry = cache_folder() / "data" / cache.key_of(facts(recipe, tokenizer, _contents(recipe)))
        own.append(_open(entry, recipe, tokenizer, tell))
        return str(entry)

    entry = Path(first_alone(world, "data", make))
    splits = in_own_time(world, "mapped data", lambda: own[0] if own else _open(entry, recipe, tokenizer, silent))
    return _checked(splits, recipe, strict)


def _same_everywhere(splits: Splits, world: World) -> Splits:
    """The splits, when every rank has the same ones. DataError on every rank alike where files differ between machines:
    a step's rows are shared out by number, so some would be trained twice and others never."""
    if world.size == 1:
        return splits
    own = {"train": splits.train.fingerprint, **{name: rows.fingerprint for name, rows in splits.evaluate.items()}}
    ranks = world.gather(own)
    odd = [rank for rank, other in enumerate(ranks) if other != ranks[0]]
    if not odd:
        return splits
    names = sorted(
        {name for rank in odd for name in {*ranks[0], *ranks[rank]} if ranks[0].get(name) != ranks[rank].get(name)}
    )
    what = f"the rows of {', '.join(names)} on rank {', '.join(map(str, odd))} are others than those on rank 0"
    error = DataError(what, "data.path", "give every machine the same data files, template and tokenizer")
    error.everywhere = True
    raise error


def _streamed(recipe: Recipe, tokenizer: Any, tell: Tell) -> Splits:
    renderer = renderer_of(recipe, tokenizer)
    settings = {**facts(recipe, tokenizer, {}), "shuffle_buffer": recipe.data.shuffle_buffer}
    train = stream(recipe, renderer, settings, tell)
    return Splits(train, evaluation_sets(recipe, renderer, frozenset(), {}, tell))


def _checked(splits: Splits, recipe: Recipe, strict: bool) -> Splits:
    splits.train.report = counted(splits.train, recipe.data)
    if strict:
        for rows in (splits.train, *splits.evaluate.values()):
            check(rows.report)
    return splits


def facts(recipe: Recipe, tokenizer: Any, contents: Mapping[str, str]) -> dict[str, Any]:
    """Everything that the prepared rows depend on, as plain values; `contents` are hashes of the files."""
    import tokenizers
    import transformers

    data = recipe.data
    template = load_template(data.template)
    settings = {name: value for name, value in data.model_dump(mode="json").items() if name not in NOT_IN_ROWS}
    return {
        "files": dict(contents),
        "template": cache.file_digest(Path(template.path)) if Path(template.path).is_file() else repr(template),
        "tokenizer": cache.tokenizer_digest(tokenizer),
        "settings": settings,
        "evaluate": {"sets": dict(recipe.evaluate.sets), "max_rows": recipe.evaluate.max_rows},
        "seed": recipe.train.seed if data.valid_share else None,
        "code": [cache.code_digest(), tokenizers.__version__, transformers.__version__],
    }


def _contents(recipe: Recipe) -> dict[str, str]:
    """Hashes of the files of every split. DataError for what cannot be found."""
    data = recipe.data
    train = {f"train {name}": path for name, path in data.mixture.items()} or {"train": data.path or ""}
    paths = {**train, **{f"evaluate {name}": path for name, path in evaluation_paths(recipe).items()}}
    return {name: _content(path, recipe) for name, path in paths.items()}


def _content(path: str, recipe: Recipe) -> str:
    """A hash of the names and bytes of the files that a path means; for a hub data set, of its records as Python writes them.

    JSON would sort the keys and lose the cells' kinds.
    """
    found = files_of(path)
    if found is None:
        return cache.text_digest(map(repr, load_records(path, recipe.data)))
    try:
        for file in found:
            check_regular(str(file), file)
        return cache.text_digest(f"{file} {cache.file_digest(file)}" for file in found)
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        raise InputError(what, error.filename or path, "check the file's permissions") from error


def _open(entry: Path, recipe: Recipe, tokenizer: Any, tell: Tell) -> Splits:
    with ExitStack() as held:
        try:
            held.enter_context(cache.locked(entry))
        except OSError as error:
            tell(f"data  prepared, not kept: {entry.parent} cannot be written ({error.strerror or error})")
            return make_splits(recipe, tokenizer, tell)
        return _cached(entry, tell) or _kept(entry, recipe, tokenizer, tell)


def _cached(entry: Path, tell: Tell) -> Splits | None:
    started = time.perf_counter()
    try:
        splits = cache.load(entry)
    except cache.BrokenCacheError as error:
        tell(f"data  the cached rows in {entry} are broken ({error}): preparing them again")
        return None
    if splits is not None:
        tell(f"data  reused {entry} ({_size(entry)}, opened in {time.perf_counter() - started:.1f} s)")
    return splits


def _kept(entry: Path, recipe: Recipe, tokenizer: Any, tell: Tell) -> Splits:
    """Prepares and writes; the rows in memory are given back, so that a full disk costs the cache alone.

    The files are hashed once more: rows of other bytes than those that named the entry must not be kept under its name.
    """
    started = time.perf_counter()
    splits = make_splits(recipe, tokenizer, tell)
    seconds = time.perf_counter() - started
    if cache.key_of(facts(recipe, tokenizer, _contents(recipe))) != entry.name:
        tell(f"data  prepared in {seconds:.1f} s, not kept: a data file was changed while it was read")
        return splits
    try:
        cache.save(entry, splits)
        kept = cache.load(entry)
    except (OSError, cache.BrokenCacheError) as error:
        tell(f"data  prepared in {seconds:.1f} s, not kept: {getattr(error, 'strerror', None) or error} ({entry})")
        return splits
    limit = cache_limit()
    removed, freed = make_room(entry.parent, limit)
    whole = size(entry.parent)
    tell(f"data  prepared in {seconds:.1f} s, kept in {entry} ({_size(entry)}; all kept data {_bytes(whole)})")
    if removed:
        what = f"{removed} prepared data set{'s' if removed > 1 else ''} ({_bytes(freed)})"
        tell(f"data  removed {what} not used for the longest: the cache keeps {_bytes(limit)} (FINETUNE_CACHE_GIB)")
    return kept or splits


def _size(entry: Path) -> str:
    return _bytes(size(entry))


def _bytes(count: float) -> str:
    return next(
        (f"{count / scale:.1f} {unit}" for unit, scale in (("GiB", 2**30), ("MiB", 2**20)) if count >= scale),
        f"{count / 2**10:.0f} KiB",
    )


def order_of(recipe: Recipe, rows: RowSet) -> Order:
    """The rows of each step of a run."""
    train = recipe.train
    if isinstance(rows, StreamRows):
        return StreamOrder(rows, recipe)
    return Order(rows.lengths, train.batch, train.batch_tokens, train.seed, mixture=mixture_of(rows, recipe.data))
