"""Where a model comes from: an embedded one, a folder, or a hub id; and what is wrong when it cannot be had.

A path that looks like a folder is never asked of the hub, so a mistyped folder is reported at once with its nearest
neighbour instead of after the hub's retries.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from finetune.config.schema import ModelSection
from finetune.environment import hub_offline, user_path
from finetune.errors import ModelError
from finetune.models.builtin import PREFIX, has_random_weights, resolve

SAFE = ("model.safetensors", "model.safetensors.index.json")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Source:
    """`name` is what other tools may load the model by (folder or hub id), `place` what to read from.

    `random`: there are no weights to read, they are drawn; the name is then the recipe's own (no tool loads it).
    """

    name: str
    place: str
    hub: bool
    offline: bool
    random: bool = False

    def require_safetensors(self, revision: str | None) -> None:
        """Raises ModelError when there are no safetensors weights: other formats are pickles, which may run code.

        A hub repository is asked first, since transformers would otherwise have another service convert it.
        """
        found = (
            _hub_has_weights(self, revision) if self.hub else any((Path(self.place) / name).is_file() for name in SAFE)
        )
        if found:
            return
        others = [] if self.hub else sorted(p.name for p in Path(self.place).iterdir() if p.suffix in PICKLES)
        pickles = f"; {', '.join(others)} is a pickle, which may run code and is not opened" if others else ""
        raise ModelError(
            f"there are no weights in safetensors ({' or '.join(SAFE)}){pickles}",
            where=self.name,
            remedy="where you trust the files, load them with transformers once and save_pretrained() to a new folder",
        )


def locate(section: ModelSection) -> Source:
    """Folder or hub id of model.path; makes an embedded model if need be. ModelError for what cannot be a model."""
    path = section.path
    is_local = path.startswith(PREFIX) or user_path(path, "model.path").exists()
    if is_local and section.revision:
        what = f"model.revision={section.revision}, but {path} is no hub id: it has no revisions"
        raise ModelError(what, "model.revision", "leave it out, or set model.path to a hub id")
    if path.startswith(PREFIX):
        place, random = resolve(path), has_random_weights(path)
        return Source(path if random else place, place, hub=False, offline=True, random=random)
    folder = user_path(path, "model.path")
    if folder.is_dir():
        _check_folder(folder)
        return Source(str(folder), str(folder), hub=False, offline=True)
    if folder.is_file():
        raise ModelError("this is a file, not a model folder", path, "set model.path to a folder with config.json")
    if _looks_local(path):
        near = _nearest(folder)
        raise ModelError("there is no such folder", path, f"did you mean {near}?" if near else "check model.path")
    return Source(path, path, hub=True, offline=hub_offline())


def _looks_local(path: str) -> bool:
    """Not `name` or `owner/name`, or one whose parent is a folder here."""
    parts = [part for part in path.replace("\\", "/").split("/") if part]
    begins = path.startswith(("/", ".", "~")) or "\\" in path or path.endswith("/")
    return begins or len(parts) > 2 or (len(parts) == 2 and Path(parts[0]).is_dir())


def _nearest(folder: Path) -> Path | None:
    """The folder with the most similar name beside the first part of the path that is missing."""
    parent, missing = folder.parent, folder.name
    while not parent.is_dir() and parent != parent.parent:
        parent, missing = parent.parent, parent.name
    try:
        names = [entry.name for entry in os.scandir(parent) if entry.is_dir()]
    except OSError:
        return None
    near = difflib.get_close_matches(missing, names, n=1)
    return parent / near[0] if near else None


def _check_folder(folder: Path) -> None:
    has_config, has_adapter = (folder / "config.json").is_file(), (folder / "adapter_config.json").is_file()
    if has_adapter:
        what = "this folder holds a model and an adapter" if has_config else "this is an adapter, not a model"
        raise ModelError(
            what, str(folder), "set model.path to the base model's folder and adapter.path to the adapter's"
        )
    if not has_config:
        inside = next((child for child in ("model", "merged") if (folder / child / "config.json").is_file()), None)
        ggufs = sorted(folder.glob("*.gguf"))
        remedy = (
            f"did you mean {folder / inside}?" if inside else "set model.path to a folder that save_pretrained() made"
        )
        what = "config.json is missing" + (f" ({ggufs[0].name} is a GGUF file, which is not read)" if ggufs else "")
        raise ModelError(what, str(folder), remedy)


def _hub_has_weights(source: Source, revision: str | None) -> bool:
    from huggingface_hub import file_exists, try_to_load_from_cache

    if any(isinstance(try_to_load_from_cache(source.place, name, revision=revision), str) for name in SAFE):
        return True
    if source.offline:
        return True  # loading itself says what the local copy lacks
    try:
        return any(file_exists(source.place, name, revision=revision) for name in SAFE)
    except (OSError, ValueError) as error:
        raise hub_fault(error, source, False) from error


FAULTS = {
    "GatedRepoError": ("is gated on the hub", "accept its terms on its hub page, then run: hf auth login"),
    "RepositoryNotFoundError": (
        "is not on the hub, or is private",
        "check the spelling of model.path; for a private model run: hf auth login",
    ),
    "RevisionNotFoundError": ("has no such revision", "check model.revision"),
    "EntryNotFoundError": ("lacks a file that is needed", "use a model repository with config.json and a tokenizer"),
    "HFValidationError": ("is neither a folder nor a hub id", "check model.path"),
}
UNREACHABLE = ("ConnectError", "ConnectionError", "LocalEntryNotFoundError", "OfflineModeIsEnabled", "TimeoutException")


def hub_fault(error: BaseException, source: Source, trusted: bool) -> ModelError:
    """What went wrong while loading, as one message with a remedy, read from the whole chain of causes."""
    classes = [kind.__name__ for link in _chain(error) for kind in type(link).__mro__]
    if source.hub:
        # Gated and missing repositories are subclasses of general errors, so the rows go from special to general.
        for name, (what, remedy) in FAULTS.items():
            if name in classes and not (name == "EntryNotFoundError" and "LocalEntryNotFoundError" in classes):
                return ModelError(f"the model {what}", source.name, remedy)
        if any(name in classes for name in UNREACHABLE):
            state = "is switched off (HF_HUB_OFFLINE)" if source.offline else "cannot be reached"
            return ModelError(
                f"the model is neither a folder here nor in the hub's cache, and the hub {state}",
                where=source.name,
                remedy="check the network, or set model.path to a model folder or to builtin:smollm2-135m",
            )
    text = " ".join(str(error).split())
    if "trust_remote_code" in text and not trusted:
        return ModelError(
            "the model brings its own Python code, which is not run",
            where=source.name,
            remedy="if you trust its author, set model.trust_remote_code=true",
        )
    if "attn_implementation" in text or "scaled_dot_product_attention" in text:
        return ModelError(
            f"the model class cannot use this attention: {text[:200]}", "model.attention", "set it to eager"
        )
    return ModelError(f"the model cannot be loaded: {text[:400]}", source.name, "check that the files are complete")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
