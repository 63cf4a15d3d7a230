"""Full fine-tuning of a part: what is trained, in which precision, what the optimizer and the plan see, and exports."""

import pytest
import torch

from finetune.checkpoint.export import export_merged
from finetune.checkpoint.verify import verify_merged
from finetune.contracts import Plan
from finetune.errors import ModelError
from finetune.memory.storage import storage_of, trained_tensors, weight_bytes
from finetune.models.load import load_model
from finetune.models.shapes import shape_of
from finetune.optim.groups import parameter_groups
from finetune.planner.estimate import Facts, estimate

BLOCK = 9  # tensors of a block: seven linears and two norms
CHOICES = {
    "last two": ({"last_blocks": 2}, 2 * BLOCK, lambda name: ".layers.1." in name or ".layers.2." in name),
    "last and head": (
        {"last_blocks": 1, "modules": ["lm_head"]},
        BLOCK + 1,
        lambda n: ".layers.2." in n or "lm_head" in n,
    ),
    "attention": ({"modules": ["self_attn"]}, 12, lambda name: "self_attn" in name),
    "a pattern": ({"modules": ["layers.[01].mlp.*_proj"]}, 6, lambda n: ".mlp." in n and ".layers.2." not in n),
    "without embedding": ({"freeze": ["embed_tokens"]}, 3 * BLOCK + 2, lambda name: "embed" not in name),
    "frozen last": (
        {"last_blocks": 2, "freeze": ["mlp", "*layernorm"]},
        8,
        lambda n: "self_attn" in n and ".layers.0." not in n,
    ),
}
IDS = (torch.arange(24) * 11 + 3).remainder(256).reshape(2, 12)


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_chosen_is_trained_in_fp32_and_the_rest_frozen(make_folder, recipe, name, precision):
    train, count, wanted = CHOICES[name]
    model = load_model(recipe(make_folder(), train=train), "cpu", precision)
    trained = model.trainable()
    every = dict(model.module.named_parameters())
    assert set(trained) == {name for name in every if wanted(name)}
    assert len(trained) == count
    frozen = torch.bfloat16 if precision == "bf16" else torch.float32
    assert all(p.dtype == (torch.float32 if name in trained else frozen) for name, p in every.items())
    elements, total = (sum(p.numel() for p in some.values()) for some in (trained, every))
    assert any(f"{elements:,} of {total:,} parameters" in notice for notice in model.notices)
    grouped = [name for group in parameter_groups(trained, 0.1) for name in group["names"]]
    assert sorted(grouped) == sorted(trained)


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_plan_counts_the_trained_part(make_folder, recipe, name, precision):
    train, _, _ = CHOICES[name]
    made = recipe(make_folder(), train=train)
    model = load_model(made, "cpu", precision)
    shape = shape_of(model.base.config)
    storage = storage_of(shape, made, precision)
    trained = sum(elements for elements, _ in trained_tensors(shape, storage))
    # A plan does not know norms by name: frozen by a pattern, those of the last two blocks stay counted.
    norms = 2 * 2 * 32 if name == "frozen last" else 0
    assert trained == sum(p.numel() for p in model.trainable().values()) + norms
    held = sum(p.numel() * p.element_size() for p in model.module.parameters())
    assert weight_bytes(shape, storage) == held + norms * (2 if precision == "bf16" else 0)


def test_a_plan_for_the_last_blocks_needs_far_less(recipe):
    from finetune.models.shapes import SHAPES

    facts = Facts(2048, "bf16", lambda elements, role: 8 * elements)
    plan = Plan("cuda", 1, False, 1024)
    whole, part = (
        estimate(SHAPES["llama3-8b"], recipe("x", train=train), plan, facts) for train in ({}, {"last_blocks": 2})
    )
    trained = 2 * SHAPES["llama3-8b"].block_parameters
    assert part.phases["step"].causes["optimizer"] == 8 * trained
    assert part.phases["step"].causes["weights"] == 4 * trained + 2 * (SHAPES["llama3-8b"].parameters - trained)
    assert part.phases["step"].total < whole.phases["step"].total / 4


@pytest.mark.parametrize("tied", [False, True])
def test_a_part_trains_and_the_export_has_it(make_folder, recipe, tmp_path, tied):
    place = make_folder(tie_word_embeddings=tied)
    made = recipe(place, train={"last_blocks": 1, "modules": ["norm"]})
    model = load_model(made, "cpu", "fp32")
    before = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    model.module.train()
    optimizer = torch.optim.AdamW(model.trainable().values(), lr=1e-2)
    for _ in range(2):
        model.module(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = {name for name, p in model.module.named_parameters() if not torch.equal(p, before[name])}
    assert moved == set(model.trainable())
    assert verify_merged(export_merged(model, tmp_path / "out"), model) < 1e-4


def test_a_shared_matrix_is_frozen_by_either_name(make_folder, recipe):
    place = make_folder(tie_word_embeddings=True)
    for name in ("embed_tokens", "lm_head"):
        model = load_model(recipe(place, train={"freeze": [name]}), "cpu", "bf16")
        assert not model.head.weight.requires_grad
        assert model.head.weight is model.base.get_input_embeddings().weight
        assert model.head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("train", "match"),
    [
        ({"last_blocks": 4}, r"train\.last_blocks=4, but .* has 3 blocks"),
        ({"modules": ["lm_heat"]}, r"'lm_heat' matches no parameter(.|\n)*did you mean 'lm_head'"),
        ({"freeze": ["embed_token"]}, r"train\.freeze: 'embed_token'(.|\n)*did you mean 'embed_tokens'"),
        ({"modules": ["norm"], "freeze": ["model.norm"]}, "nothing is left to train"),
    ],
)
def test_choices_that_mean_nothing_are_refused(make_folder, recipe, train, match):
    with pytest.raises(ModelError, match=match):
        load_model(recipe(make_folder(), train=train), "cpu", "fp32")


def test_a_run_of_the_last_block_resumes_and_exports(tmp_path):
    import finetune
    from finetune.train.after import export

    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "to be or not"}\n{"text": "that is the question"}\n')
    recipe = {
        "model": {"path": "builtin:tiny", "precision": "bf16"},
        "data": {"path": str(data), "template": "text", "train_on": "all", "max_tokens": 32},
        "train": {"batch": 2, "max_steps": 2, "last_blocks": 1},
        "checkpoint": {"every": 1},
        "run": {"dir": str(tmp_path / "run")},
        "device": "cpu",
        "generate": {"max_tokens": 2},
    }
    first = finetune.run(recipe)
    assert first.summary["loss_last"] < first.summary["loss_first"]
    again = finetune.run({**recipe, "train": {**recipe["train"], "max_steps": 3}, "resume": "auto"})
    assert again.summary["steps"] == 3
    assert export(again.dir, "merged", tmp_path / "out", None)["largest_logit_difference"] < 0.1
