"""A captured backward pass outlives the tensors that its forward pass saved."""

import gc

import pytest
import torch

from hf_attn_backends.bench.timing import capture

pytestmark = pytest.mark.gpu


def test_what_the_graph_reads_stays_allocated():
    """The next capture empties the allocator's cache; a replay must still find its inputs."""
    with torch.cuda.stream(torch.cuda.Stream()):
        leaf = torch.randn(1 << 22, device="cuda", requires_grad=True)
        result = torch.empty_like(leaf)

        def backward_of_a_saved_tensor():
            saved = torch.full((1 << 22,), 3.0, device="cuda")  # its memory is nobody else's
            out = leaf * saved

            def backward():
                grad = torch.autograd.grad(out, leaf, torch.ones_like(leaf), retain_graph=True)[0]
                result.copy_(grad)

            return backward

        call = backward_of_a_saved_tensor()
        call()
        replay = capture(call)
        del call
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.full((1 << 24,), -1.0, device="cuda")
        result.zero_()
        replay()
        torch.cuda.synchronize()
        assert torch.equal(result, torch.full_like(result, 3.0))
