"""The codec: exact both ways, compact, and strict about what it reads."""

import math

import numpy as np
import pytest
from hypothesis import given

from tests.trajectories.records import drawn_groups, drawn_trajectories, group, tokens, trajectory, turn
from trajectories.codec import (
    CodecError,
    RecordKind,
    UnknownSchemaVersion,
    decode_group,
    decode_sample,
    encode_group,
    encode_sample,
    kind_of,
)
from trajectories.samples import trajectory_samples
from trajectories.schema import PolicyVersion, Trajectory, TurnTokens, VersionSpan


@given(drawn_groups)
def test_a_group_equals_itself_after_a_round_trip(drawn):
    assert decode_group(encode_group(drawn)) == drawn


@given(drawn_trajectories())
def test_a_sample_equals_itself_after_a_round_trip(drawn: Trajectory):
    for sample in trajectory_samples(drawn):
        decoded = decode_sample(encode_sample(sample))
        for field in ("ids", "mask", "logprobs"):
            before, after = getattr(sample, field), getattr(decoded, field)
            assert before.dtype == after.dtype
            assert np.array_equal(before, after)


def _with_logprobs(*values: float) -> TurnTokens:
    span = VersionSpan(version=PolicyVersion(lineage=0, n=0), num_tokens=len(values))
    return TurnTokens(prefix_len=0, new_ids=(1,), sampled_ids=(7,) * len(values), logprobs=values, spans=(span,))


def _decoded_logprobs(turn_tokens: TurnTokens) -> tuple[float, ...]:
    read = decode_group(encode_group(group(trajectory(turn(turn_tokens)))))
    read_tokens = read.trajectories[0].turns[0].tokens
    assert read_tokens is not None
    return read_tokens.logprobs


def test_logprobs_that_are_float32_take_four_bytes_a_token_and_others_eight():
    one_third_32 = float(np.float32(-1 / 3))
    narrow = encode_group(group(trajectory(turn(_with_logprobs(*[one_third_32] * 100)))))
    wide = encode_group(group(trajectory(turn(_with_logprobs(*[-1 / 3] * 100)))))
    # msgpack's length prefix grows with the string: 2 bytes for at most 255, 3 beyond, so both take 3 here.
    assert len(wide) - len(narrow) == 400
    assert _decoded_logprobs(_with_logprobs(one_third_32)) == (one_third_32,)
    assert _decoded_logprobs(_with_logprobs(-1 / 3)) == (-1 / 3,)


def test_logprobs_of_minus_infinity_nan_and_beyond_float32_are_kept():
    values = _decoded_logprobs(_with_logprobs(-math.inf, math.nan, -1e300))
    assert values[0] == -math.inf
    assert math.isnan(values[1])
    assert values[2] == -1e300


def test_a_token_id_beyond_int32_is_refused_not_wrapped():
    with pytest.raises(OverflowError):
        encode_group(group(trajectory(turn(tokens((2**31,), ())))))


def test_a_record_of_a_future_version_is_refused_by_name():
    future = encode_group(group()).replace(b"\x93\x01", b"\x93\x02", 1)  # an array of 3, version 1 -> 2
    with pytest.raises(UnknownSchemaVersion, match="schema version 2, this code reads 1: update"):
        decode_group(future)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"hello", b"\x81\xa1a\x01", b"\x90"])
def test_bytes_that_are_no_record_are_refused(payload: bytes):
    with pytest.raises(CodecError):
        decode_group(payload)


def test_a_sample_is_not_read_as_a_group():
    payload = encode_sample(trajectory_samples(trajectory(turn(tokens((1,), (2,)))))[0])
    assert kind_of(payload) is RecordKind.SAMPLE
    with pytest.raises(CodecError, match="expected a group record, found a sample record"):
        decode_group(payload)
