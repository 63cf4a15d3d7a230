"""House rules on what files import and call: downwards only, lightly, and nothing that runs untrusted code."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.house.source import ROOT, Module, imports, modules, running

ORDER = (
    ("__main__",),
    ("commands",),
    ("train",),
    ("generate",),
    ("tasks", "planner"),
    ("models", "data", "memory", "parallel", "optim", "checkpoint"),
    ("kernels", "telemetry", "machine"),
    ("config",),
    ("contracts", "errors", "environment"),
)
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
NOUNS = LEVEL["contracts"]
HEAVY = ("torch", "transformers", "peft", "accelerate", "datasets", "bitsandbytes", "pandas", "numpy", "pyarrow")
LIGHT_ROOMS = ("__main__", "commands", "config", "contracts", "errors", "environment", "planner")

every_module = pytest.mark.parametrize("module", modules(), ids=repr)


def room_of(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def own(module: Module) -> list[tuple[int, str]]:
    """Imports of the project's own modules, less the package's root (its version)."""
    return [(line, name) for line, name in imports(module) if name.startswith("finetune.")]


@every_module
def test_imports_go_down(module: Module) -> None:
    if module.room == "":
        return  # finetune/__init__.py fetches `run` from the top when asked
    here, wrong = LEVEL[module.room], []
    for line, name in own(module):
        there = LEVEL[room_of(name)]
        inside = room_of(name) == module.room
        if not (there > here or inside or (here == there == NOUNS)):
            wrong.append(f"{module.path}:{line} imports {name}")
    assert wrong == []


def test_no_file_imports_itself_through_others() -> None:
    edges = {module.name: {name for _, name in own(module)} - {module.name} for module in modules() if module.room}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"a cycle of imports: {' > '.join((*trail, name))}"
        if name not in done:
            for following in sorted(edges.get(name, ())):
                visit(following, (*trail, name))
            done.add(name)

    for name in edges:
        visit(name, ())
    assert len(done) >= len(edges)


@every_module
def test_light_rooms_import_heavy_packages_inside_functions(module: Module) -> None:
    if module.room not in LIGHT_ROOMS:
        return
    top = ast.Module([node for node in module.tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
    found = [name for _, name in imports(Module(module.name, module.path, "", top)) if name.split(".")[0] in HEAVY]
    assert found == []


def test_importing_the_package_and_its_command_line_is_light() -> None:
    optional = ("torch", "transformers", "peft", "accelerate", "datasets", "bitsandbytes", "torchvision", "torchao")
    program = (
        "import sys, finetune, finetune.__main__, finetune.config.load, finetune.commands.table as t\n"
        "from finetune.commands.arguments import known_names\n"
        "finetune.Result, finetune.run, known_names()\n"
        "[t.word_module(c) for c in t.COMMANDS.values() if c.module]\n"
        f"print([name for name in {(*optional, 'liger_kernel', 'wandb', 'trackio', 'tensorboard')!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@every_module
def test_environment_variables_are_read_in_one_place(module: Module) -> None:
    if module.room == "environment":
        return
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv", "unsetenv"):
            found.append(node.lineno)
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            found += [node.lineno for alias in node.names if alias.name in ("environ", "environb", "getenv", "putenv")]
    assert found == []


def forbidden_call(node: ast.Call) -> str | None:
    """What a call does that no call may: unpickle, load torch's pickles, run a model folder's code, evaluate text."""
    called = ast.unparse(node.func)
    if called in ("torch.load", "eval", "exec", "os.system", "yaml.load", "yaml.unsafe_load", "yaml.full_load"):
        return called
    for keyword in node.keywords:
        value = keyword.value
        if (
            keyword.arg in ("trust_remote_code", "allow_pickle", "shell")
            and isinstance(value, ast.Constant)
            and value.value
        ):
            return f"{keyword.arg}=True"
    return None


@every_module
def test_nothing_runs_untrusted_code(module: Module) -> None:
    bad = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve")
    found = [f"line {line}: import {name}" for line, name in imports(module) if name.split(".")[0] in bad]
    calls = [node for node in running(module.tree) if isinstance(node, ast.Call)]
    found += [f"line {call.lineno}: {reason}" for call in calls if (reason := forbidden_call(call))]
    assert found == []


def test_forbidden_calls_are_seen() -> None:
    def seen(text: str) -> str | None:
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call)
        return forbidden_call(call)

    assert seen("torch.load(path)") == "torch.load"
    assert seen("AutoModel.from_pretrained(p, trust_remote_code=True)") == "trust_remote_code=True"
    assert seen("AutoModel.from_pretrained(p, trust_remote_code=section.trust_remote_code)") is None
    assert seen("yaml.safe_load(text)") is None
