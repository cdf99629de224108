import torch

from actors.weight_noise import Noise, canary_groups, disturb, tensor_groups


def test_groups_are_names_without_their_layer_number():
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.11.mlp.up_proj.weight"]
    assert tensor_groups(names) == {
        "model.embed_tokens.weight": ("model.embed_tokens.weight",),
        "model.layers.*.mlp.up_proj.weight": tuple(names[1:]),
    }


def test_a_tied_head_gets_a_group_that_leaves_the_probed_rows_alone():
    groups = canary_groups(["model.embed_tokens.weight"], [5, 3, 5])
    assert groups["lm_head (tied)"] == Noise(names=("model.embed_tokens.weight",), scale=1.0, kept_rows=(3, 5))
    assert "lm_head (tied)" not in canary_groups(["model.embed_tokens.weight", "lm_head.weight"], [5, 3])


def test_noise_has_the_asked_size_and_is_the_same_each_time():
    weight = torch.full((200, 200), 3.0)
    noise = Noise(names=("w",), scale=0.5)
    first, second = (disturb(weight, "w", noise) for _ in range(2))
    assert torch.equal(first, second)
    assert abs((first - weight).std().item() - 1.5) < 0.02
    assert not torch.equal(disturb(weight, "v", noise), first)


def test_kept_rows_stay_and_zero_tensors_still_move():
    zeros = torch.zeros(4, 3)
    moved = disturb(zeros, "w", Noise(names=("w",), scale=0.5, kept_rows=(1, 2)))
    assert (moved != 0).any(dim=1).tolist() == [True, False, False, True]


def test_noise_is_visible_in_bfloat16():
    weight = torch.randn(64, 64).to(torch.bfloat16)
    assert (disturb(weight, "w", Noise(names=("w",), scale=0.5)) != weight).float().mean() > 0.95
