"""Chunked log-probabilities against the plain formula on full logits, and the sizes of what they allocate."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from learners.logprobs import token_logprobs


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_probs = torch.log_softmax(hidden @ weight.t() / temperature, -1)
    return log_probs.gather(1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def gradients(function, temperature: float, grad_logprobs: Tensor, grad_entropy: Tensor, **options) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, 16, generator=generator, requires_grad=True)
    weight = torch.randn(50, 16, generator=generator, requires_grad=True)
    targets = torch.randint(0, 50, (37,), generator=generator)
    logprobs, entropy = function(hidden, weight, targets, temperature=temperature, **options)
    ((logprobs * grad_logprobs).sum() + (entropy * grad_entropy).sum()).backward()
    assert hidden.grad is not None and weight.grad is not None
    return [logprobs, entropy, hidden.grad, weight.grad]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [1, 8, 37, 1000])
def test_chunks_equal_the_plain_formula_with_gradients(temperature: float, chunk_tokens: int) -> None:
    grads = torch.linspace(-1, 1, 37), torch.linspace(0.5, -0.3, 37)
    chunked = gradients(token_logprobs, temperature, *grads, chunk_tokens=chunk_tokens)
    for ours, theirs in zip(chunked, gradients(plain, temperature, *grads), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


def test_gradients_are_those_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, 4, generator=generator)
    weight = torch.randn(5, 4, generator=generator)
    targets = torch.tensor([0, 4, 2])
    step = 1e-2
    ours = hidden.clone().requires_grad_()
    token_logprobs(ours, weight, targets)[0].sum().backward()
    assert ours.grad is not None
    for row, column in [(0, 0), (1, 2), (2, 3)]:
        nudge = torch.zeros_like(hidden)
        nudge[row, column] = step
        difference = (
            plain(hidden + nudge, weight, targets, 1.0)[0] - plain(hidden - nudge, weight, targets, 1.0)[0]
        ).sum()
        assert float(ours.grad[row, column]) == pytest.approx(float(difference) / (2 * step), abs=1e-3)


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any tensor made inside had."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


def test_no_tensor_of_tokens_times_vocabulary_ever_exists() -> None:
    num_tokens, vocabulary, width, chunk_tokens = 600, 2000, 8, 32
    hidden = torch.randn(num_tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    with LargestTensor() as seen:
        logprobs, entropy = token_logprobs(hidden, weight, torch.zeros(num_tokens).long(), chunk_tokens=chunk_tokens)
        (logprobs + entropy).sum().backward()
    assert seen.num_elements == chunk_tokens * vocabulary


def test_no_tokens_give_no_logprobs_and_zero_gradients() -> None:
    hidden, weight = torch.randn(0, 8, requires_grad=True), torch.randn(10, 8, requires_grad=True)
    logprobs, _ = token_logprobs(hidden, weight, torch.zeros(0).long())
    logprobs.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


def test_a_temperature_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature must be > 0"):
        token_logprobs(torch.zeros(1, 2), torch.zeros(3, 2), torch.zeros(1).long(), temperature=0.0)
