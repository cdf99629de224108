import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from actors import weight_stage
from actors.weight_stage import corrupt_tensors, digest_of, manifest_from_message, narrowed, read_stage, write_stage
from trajectories.schema import PolicyVersion

V = [PolicyVersion(lineage=0, n=n) for n in range(4)]


def tensors() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)}


def test_a_stage_is_safetensors_that_others_read(tmp_path: Path):
    manifest = write_stage(tmp_path, V[0], iter(tensors().items()))
    loaded = load_file(manifest.directory / manifest.tensors[0].shard)
    assert loaded.keys() == {"a", "b"} and all(torch.equal(loaded[name], value) for name, value in tensors().items())
    assert [(t.name, t.dtype, t.shape) for t in manifest.tensors] == [("a", "F32", (2, 3)), ("b", "BF16", (2,))]
    assert manifest.num_bytes == 6 * 4 + 2 * 2


def test_what_is_wider_than_the_servers_is_rounded_and_the_rest_stays():
    wide = {"a": torch.tensor([1.00390625, 1.01171875]), "b": torch.tensor([1.5], dtype=torch.bfloat16)}
    rounded = dict(narrowed(iter(wide.items()), "bfloat16"))
    assert rounded["a"].dtype == torch.bfloat16 and rounded["a"].tolist() == [1.0, 1.015625], "half to even"
    assert rounded["b"] is wide["b"]
    kept = dict(narrowed(iter(wide.items()), "float32"))
    assert kept["a"] is wide["a"] and kept["b"] is wide["b"]


def test_reading_gives_the_tensors_in_order_with_their_digests(tmp_path: Path):
    manifest = write_stage(tmp_path, V[0], iter(tensors().items()))
    read = [(staged.name, staged.digest, value) for staged, value in read_stage(manifest)]
    assert [name for name, _, _ in read] == ["a", "b"]
    assert all(digest == digest_of(value) for _, digest, value in read) and corrupt_tensors(manifest) == []


def test_a_changed_byte_changes_the_digest(tmp_path: Path):
    manifest = write_stage(tmp_path, V[0], iter(tensors().items()))
    shard = manifest.directory / manifest.tensors[0].shard
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert corrupt_tensors(manifest) == ["b"]


def test_digests_of_a_transposed_view_are_those_of_its_values():
    matrix = torch.arange(6.0).reshape(2, 3)
    assert digest_of(matrix.T) == digest_of(matrix.T.contiguous()) != digest_of(matrix)


def test_a_full_shard_starts_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(weight_stage, "SHARD_BYTES", 24)
    manifest = write_stage(tmp_path, V[0], iter(tensors().items()))
    assert [tensor.shard for tensor in manifest.tensors] == ["weights-00000.safetensors", "weights-00001.safetensors"]
    assert [staged.name for staged, _ in read_stage(manifest)] == ["a", "b"]


def test_a_header_that_is_full_starts_the_next_shard(tmp_path: Path):
    many = {f"model.layers.{i}.{'x' * 60}": torch.zeros(1) for i in range(600)}
    manifest = write_stage(tmp_path, V[0], iter(many.items()))
    assert len({tensor.shard for tensor in manifest.tensors}) == 3
    assert [staged.name for staged, _ in read_stage(manifest)] == list(many)


def test_only_two_versions_are_kept(tmp_path: Path):
    for version in V:
        write_stage(tmp_path, version, iter(tensors().items()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.2", "0.3"]


def test_a_writer_that_fails_leaves_the_earlier_versions_as_they_were(tmp_path: Path):
    def failing():
        yield "a", torch.zeros(2)
        raise RuntimeError("gather failed")

    write_stage(tmp_path, V[0], iter(tensors().items()))
    with pytest.raises(RuntimeError, match="gather failed"):
        write_stage(tmp_path, V[1], failing())
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["0.0"]


def test_nothing_to_stage_and_strange_dtypes_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="no tensors"):
        write_stage(tmp_path, V[0], iter(()))
    with pytest.raises(ValueError, match=r"dtype torch\.float64"):
        write_stage(tmp_path, V[0], iter([("a", torch.zeros(1, dtype=torch.float64))]))


def test_a_manifest_survives_pickle_and_plain_messages(tmp_path: Path):
    manifest = write_stage(tmp_path, V[2], iter(tensors().items()))
    assert pickle.loads(pickle.dumps(manifest)) == manifest
    assert manifest_from_message(manifest.as_message()) == manifest
