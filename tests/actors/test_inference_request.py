from actors.inference_request import Part, Request, join_parts, rest_of, spans_of
from envs.sampler import SamplingParams
from trajectories.schema import PolicyVersion, VersionSpan

V1, V2 = PolicyVersion(lineage=0, n=1), PolicyVersion(lineage=0, n=2)


def span(version: PolicyVersion, num_tokens: int) -> VersionSpan:
    return VersionSpan(version=version, num_tokens=num_tokens)


def test_spans_are_cut_where_the_part_begins_and_ends():
    starts = [("0.1", 0), ("0.2", 5)]
    assert spans_of(starts, 4, 7) == (span(V1, 1), span(V2, 2))
    assert spans_of(starts, 0, 5) == (span(V1, 5),)
    assert spans_of(starts, 5, 6) == (span(V2, 1),)
    assert spans_of(starts, 3, 3) == ()
    assert spans_of([], 0, 0) == ()  # dropped before its first token


def test_parts_join_and_neighbouring_spans_of_one_version_become_one():
    parts = [
        Part(ids=(1, 2), logprobs=(-1.0, -2.0), spans=(span(V1, 2),)),
        Part(ids=(3, 4), logprobs=(-3.0, -4.0), spans=(span(V1, 1), span(V2, 1))),
        Part(ids=(), logprobs=(), spans=(), finish_reason="stop"),
    ]
    completion = join_parts(parts)
    assert completion.ids == (1, 2, 3, 4) and completion.logprobs == (-1.0, -2.0, -3.0, -4.0)
    assert completion.spans == (span(V1, 3), span(V2, 1)) and completion.finish_reason == "stop"


def test_the_rest_of_a_request_keeps_what_was_sampled_and_draws_anew():
    request = Request(prompt_ids=[1], params=SamplingParams(max_tokens=5, seed=7), stop_ids=[2], priority=3, salt="s")
    assert rest_of(request, []) is request
    parts = [Part(ids=(8, 9), logprobs=(-1.0, -1.0), spans=(span(V1, 2),))]
    rest = rest_of(request, parts)
    assert list(rest.prompt_ids) == [1, 8, 9] and rest.params.max_tokens == 3
    assert (rest.priority, rest.salt, list(rest.stop_ids)) == (3, "s", [2])
    assert rest.params.seed == rest_of(request, parts).params.seed != 7
