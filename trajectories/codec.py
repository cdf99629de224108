"""Records <-> bytes: a Group or a Sample as one msgpack payload that carries its schema version.

Invariant: decoding what was encoded gives an equal record, every float and every character exact.
Called by trajectories/store.py; whoever moves a record between processes may call it too.

A payload is the array `[SCHEMA_VERSION, kind, body]`; records are arrays too, their fields in the order written here.
Token ids are little-endian int32. Log-probabilities are little-endian float32 when every one of them is exactly a
float32 (vLLM's are), else float64; the byte length tells which, so nothing is ever rounded.
"""

# msgpack ships no types; what it returns is checked in `_open`.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, cast

import msgpack
import numpy as np

from trajectories.samples import Sample
from trajectories.schema import Group, Outcome, PolicyVersion, Trajectory, Turn, TurnTokens, Usage, VersionSpan

SCHEMA_VERSION = 1


class CodecError(ValueError):
    """The bytes are not a record that this code reads."""


class UnknownSchemaVersion(CodecError):
    """The record was written by a newer version of the code."""


class RecordKind(StrEnum):
    """What a payload holds."""

    GROUP = "group"
    SAMPLE = "sample"
    JOURNAL = "journal"


def encode_group(group: Group) -> bytes:
    """The Group as a payload."""
    return _pack(RecordKind.GROUP, [group.id, group.task_id, [_trajectory_fields(t) for t in group.trajectories]])


def decode_group(payload: bytes) -> Group:
    """The Group of a payload; CodecError when it holds none."""
    group_id, task_id, trajectories = _unpack(payload, RecordKind.GROUP)
    return Group(id=group_id, task_id=task_id, trajectories=tuple(_trajectory(fields) for fields in trajectories))


def encode_sample(sample: Sample) -> bytes:
    """The Sample as a payload; its mask takes one bit a token."""
    body = [_int32(sample.ids), np.packbits(sample.mask).tobytes(), sample.logprobs.astype("<f4").tobytes()]
    return _pack(RecordKind.SAMPLE, body)


def decode_sample(payload: bytes) -> Sample:
    """The Sample of a payload; CodecError when it holds none."""
    ids_bytes, mask_bytes, logprobs_bytes = _unpack(payload, RecordKind.SAMPLE)
    ids = np.frombuffer(ids_bytes, "<i4").astype(np.int32)
    mask = np.unpackbits(np.frombuffer(mask_bytes, np.uint8), count=len(ids)).astype(np.bool_)
    return Sample(ids=ids, mask=mask, logprobs=np.frombuffer(logprobs_bytes, "<f4").astype(np.float32))


def encode_journal(rows: Sequence[Sequence[Any]]) -> bytes:
    """A batch of the ledger's rows as a payload; each row holds strings, numbers and None."""
    return _pack(RecordKind.JOURNAL, [list(row) for row in rows])


def decode_journal(payload: bytes) -> list[list[Any]]:
    """The rows of a payload, in order; CodecError when it holds none."""
    return _unpack(payload, RecordKind.JOURNAL)


def kind_of(payload: bytes) -> RecordKind:
    """What the payload holds; CodecError when it is none of ours."""
    return _open(payload)[0]


def _pack(kind: RecordKind, body: list[Any]) -> bytes:
    # surrogatepass: a terminal's output may hold bytes that are not UTF-8, kept as lone surrogates.
    return cast(bytes, msgpack.packb([SCHEMA_VERSION, kind.value, body], unicode_errors="surrogatepass"))


def _unpack(payload: bytes, expected: RecordKind) -> list[Any]:
    kind, body = _open(payload)
    if kind is not expected:
        raise CodecError(f"expected a {expected} record, found a {kind} record")
    return body


def _open(payload: bytes) -> tuple[RecordKind, list[Any]]:
    try:
        record = cast(object, msgpack.unpackb(payload, unicode_errors="surrogatepass"))
    except (ValueError, msgpack.UnpackException) as error:
        raise CodecError(f"not a msgpack record: {error}") from error
    if not isinstance(record, list) or not record or not isinstance(record[0], int):
        raise CodecError("not a record of this store: it does not start with a schema version")
    version, *rest = cast(list[Any], record)
    if version != SCHEMA_VERSION:
        raise UnknownSchemaVersion(
            f"record has schema version {version}, this code reads {SCHEMA_VERSION}: update the code that reads it"
        )
    kind, body = rest
    return RecordKind(kind), body


def _trajectory_fields(trajectory: Trajectory) -> list[Any]:
    return [
        trajectory.id,
        trajectory.task_id,
        trajectory.group_id,
        trajectory.member,
        trajectory.prompt,
        [_turn_fields(turn) for turn in trajectory.turns],
        trajectory.outcome.value,
        trajectory.reward,
        trajectory.evidence,
        trajectory.error,
        dict(trajectory.timings_s),
        dict(trajectory.provenance),
    ]


def _trajectory(fields: list[Any]) -> Trajectory:
    id_, task_id, group_id, member, prompt, turns, outcome, reward, evidence, error, timings_s, provenance = fields
    return Trajectory(
        id=id_,
        task_id=task_id,
        group_id=group_id,
        member=member,
        prompt=prompt,
        turns=tuple(_turn(turn) for turn in turns),
        outcome=Outcome(outcome),
        reward=reward,
        evidence=evidence,
        error=error,
        timings_s=timings_s,
        provenance=provenance,
    )


def _turn_fields(turn: Turn) -> list[Any]:
    tokens = None if turn.tokens is None else _token_fields(turn.tokens)
    fields = [turn.reply, turn.observation, turn.finish_reason, tokens, turn.sample_s, turn.execute_s]
    if turn.usage is None:
        return fields
    return [*fields, [turn.usage.prompt_tokens, turn.usage.completion_tokens, turn.usage.cost_usd]]


def _turn(fields: list[Any]) -> Turn:
    reply, observation, finish_reason, tokens, sample_s, execute_s, *usage = fields
    return Turn(
        reply=reply,
        observation=observation,
        finish_reason=finish_reason,
        tokens=None if tokens is None else _tokens(tokens),
        sample_s=sample_s,
        execute_s=execute_s,
        usage=_usage(usage[0]) if usage else None,
    )


def _usage(fields: list[Any]) -> Usage:
    prompt_tokens, completion_tokens, cost_usd = fields
    return Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, cost_usd=cost_usd)


def _token_fields(tokens: TurnTokens) -> list[Any]:
    return [
        tokens.prefix_len,
        _int32(tokens.new_ids),
        _int32(tokens.sampled_ids),
        _floats(tokens.logprobs),
        [[span.version.lineage, span.version.n, span.num_tokens] for span in tokens.spans],
    ]


def _tokens(fields: list[Any]) -> TurnTokens:
    prefix_len, new_ids, sampled_ids, logprobs, spans = fields
    num_sampled = len(sampled_ids) // 4
    dtype = "<f8" if len(logprobs) == 8 * num_sampled else "<f4"
    return TurnTokens(
        prefix_len=prefix_len,
        new_ids=tuple(np.frombuffer(new_ids, "<i4").tolist()),
        sampled_ids=tuple(np.frombuffer(sampled_ids, "<i4").tolist()),
        logprobs=tuple(np.frombuffer(logprobs, dtype).tolist()),
        spans=tuple(
            VersionSpan(version=PolicyVersion(lineage=lineage, n=n), num_tokens=num_tokens)
            for lineage, n, num_tokens in spans
        ),
    )


def _int32(ids: Sequence[int] | np.ndarray[Any, np.dtype[np.int32]]) -> bytes:
    return np.asarray(ids, "<i4").tobytes()


def _floats(values: Sequence[float]) -> bytes:
    wide = np.asarray(values, "<f8")
    with np.errstate(over="ignore"):  # a value beyond float32 becomes inf, differs, and is then kept wide
        narrow = wide.astype("<f4")
    return (narrow if np.array_equal(narrow.astype("<f8"), wide, equal_nan=True) else wide).tobytes()
