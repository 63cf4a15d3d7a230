"""The only reader of environment variables. Imports no torch.

This branch's part: where the cache is, and whether the model hub may be asked.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where things made once are kept: FINETUNE_CACHE, else XDG_CACHE_HOME/finetune, else ~/.cache/finetune."""
    own = os.environ.get("FINETUNE_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "finetune"


def hub_offline() -> bool:
    """True when the user has switched the model hub off (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE)."""
    truths = ("1", "on", "yes", "true")
    return any(os.environ.get(name, "").lower() in truths for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
