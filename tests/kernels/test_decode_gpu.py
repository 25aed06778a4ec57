"""What only a GPU shows of decoding: compiled kernels, CUDA graphs, no synchronisation."""

import pytest
import torch

from hf_attn_backends.kernels.visibility import CAUSAL, FULL, Visibility
from hf_attn_backends.reference import attention_reference

pytestmark = pytest.mark.gpu

SHAPES = [  # B, H, G, M, N
    (1, 32, 8, 1, 4099),
    (3, 8, 1, 1, 1000),
    (2, 8, 8, 1, 777),
    (2, 12, 2, 4, 2051),
    (1, 32, 8, 16, 1500),
    (5, 8, 2, 7, 64),
]
KINDS = {"full": FULL, "causal": CAUSAL, "window": Visibility(causal=True, window=300)}


def draw(shape, dim, dtype, seed=0):
    b, h, g, m, n = shape
    generator = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.randn(b, length, heads, dim, generator=generator, device="cuda").to(dtype)
        .transpose(1, 2)
        for heads, length in ((h, m), (g, n), (g, n))
    ]  # fmt: skip


def check(got, query, key, value, visibility, scale):
    """Within twice eager's own error in the same dtype, never less than four roundings.

    A rounding is one of what is summed, before it cancels.
    """
    exact, rough = (
        attention_reference(query, key, value, visibility=visibility, scale=scale, dtype=dtype)
        for dtype in (torch.float64, query.dtype)
    )
    hidden = torch.isneginf(exact[1])
    assert torch.equal(torch.isneginf(got[1]), hidden)
    assert float(got[0][hidden].abs().sum()) == 0.0
    out, lse = ((a.double() - b.double()).masked_fill(hidden.view(*hidden.shape, *tail), 0.0).abs()
                for a, b, tail in zip(got, exact, ((1,), ()), strict=True))  # fmt: skip
    assert torch.isfinite(out).all()
    eager = float((rough[0].double() - exact[0]).abs().max())
    terms, _ = attention_reference(query, key, value.abs(), visibility=visibility, scale=scale)
    size = float(terms.max())
    assert float(out.max()) <= 2 * eager + 4 * torch.finfo(query.dtype).eps * size
    assert float(lse.max()) <= 2e-5


def decode(*args, **kwargs):
    from hf_attn_backends.gate.attend import poisoned
    from hf_attn_backends.kernels.triton.decode import launch_decode

    with poisoned():
        return launch_decode(*args, **kwargs)


@pytest.mark.parametrize("kind", [*KINDS, "intervals"])
@pytest.mark.parametrize(
    ("dtype", "dim"),
    [
        (torch.bfloat16, 128), (torch.bfloat16, 64), (torch.bfloat16, 96), (torch.bfloat16, 256),
        (torch.float16, 128), (torch.float16, 16), (torch.float32, 128), (torch.float32, 256),
    ],
)  # fmt: skip
def test_classes(kind, dtype, dim):
    for shape in SHAPES:
        tensors = draw(shape, dim, dtype)
        visibility = KINDS.get(kind)
        if visibility is None:
            first = torch.randint(0, shape[4], (shape[0], shape[3]), device="cuda")
            last = torch.randint(0, shape[4] + 5, (shape[0], shape[3]), device="cuda")
            visibility = Visibility(intervals=torch.stack([first, last], -1).int())
        for splits in (None, 1, 5):
            check(decode(*tensors, visibility, dim**-0.5, splits=splits), *tensors, visibility,
                  dim**-0.5)  # fmt: skip


@pytest.mark.parametrize("block_size", [16, 256, 24])
@pytest.mark.parametrize("q_len", [1, 4])
def test_paged_equals_contiguous(block_size, q_len):
    from hf_attn_backends.kernels.triton.decode import launch_paged_decode

    query, key, value = draw((3, 32, 8, q_len, 1536), 128, torch.bfloat16)
    blocks = 1536 // block_size
    order = torch.randperm(3 * blocks, device="cuda")
    table = order.view(3, blocks).int()
    caches = []
    for tensor in (key, value):
        cache = torch.empty(3 * blocks, block_size, 8, 128, device="cuda", dtype=torch.bfloat16)
        cache[order] = tensor.transpose(1, 2).reshape(3 * blocks, block_size, 8, 128)
        caches.append(cache)
    lengths = torch.tensor([1536, 1, 700], dtype=torch.int32, device="cuda")
    paged = launch_paged_decode(query, *caches, table, lengths, CAUSAL, 0.09)
    plain = decode(query, key, value, CAUSAL, 0.09, lengths=lengths)
    torch.testing.assert_close(paged[0], plain[0], rtol=2e-2, atol=2e-3)
    for b, n in enumerate(lengths.tolist()):
        alone = [query[b, None], key[b, None, :, :n], value[b, None, :, :n]]
        check((paged[0][b, None], paged[1][b, None]), *alone, CAUSAL, 0.09)


def test_a_captured_graph_follows_its_inputs():
    """Lengths and keys change under the graph; the answer is the eager one, to the bit."""
    query, key, value = draw((2, 8, 2, 2, 3000), 128, torch.bfloat16)
    lengths = torch.tensor([100, 3000], dtype=torch.int32, device="cuda")
    decode(query, key, value, CAUSAL, 0.09, lengths=lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    from hf_attn_backends.kernels.triton.decode import launch_decode

    with torch.cuda.graph(graph):
        captured = launch_decode(query, key, value, CAUSAL, 0.09, lengths=lengths)
    for counts in ([100, 3000], [2999, 1], [0, 777]):
        lengths.copy_(torch.tensor(counts))
        key.normal_()
        want = launch_decode(query, key, value, CAUSAL, 0.09, lengths=lengths)
        for tensor in captured:
            tensor.fill_(float("nan"))
        for _ in range(3):
            graph.replay()
        assert torch.equal(captured[0], want[0])
        assert torch.equal(captured[1], want[1])


def test_nothing_waits_for_the_gpu_and_lengths_do_not_recompile():
    from hf_attn_backends.kernels.triton import decode_kernels

    def run(batch, length, window):
        tensors = draw((batch, 8, 2, 1, length), 128, torch.bfloat16)
        lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            decode(*tensors, Visibility(causal=True, window=window), 0.1, lengths=lengths, splits=3)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    run(2, 999, 500)
    kernels = (decode_kernels._attn_decode_kernel, decode_kernels._attn_decode_combine_kernel)
    before = [len(kernel.device_caches[0][0]) for kernel in kernels]
    for batch, length, window in ((3, 1000, 17), (1, 4096, 1), (16, 64, 64)):
        run(batch, length, window)
    assert [len(kernel.device_caches[0][0]) for kernel in kernels] == before


def test_offsets_beyond_2_to_the_31():
    """Keys that lie 2^31 elements and more apart give what compact ones give, to the bit."""
    length, gap = 70, 2**25 + 2**10
    room = torch.empty(length * gap + 2**16, dtype=torch.bfloat16, device="cuda")
    far = torch.as_strided(room, (1, 2, length, 128), (length * gap, 128, gap, 1))
    far.normal_()
    query = torch.randn(1, 8, 1, 128, dtype=torch.bfloat16, device="cuda")
    got = decode(query, far, far, CAUSAL, 0.1)
    near = far.contiguous()
    want = decode(query, near, near, CAUSAL, 0.1)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.multigpu
def test_the_second_device():
    tensors = [t.to("cuda:1") for t in draw((2, 8, 2, 1, 1000), 128, torch.bfloat16)]
    assert torch.cuda.current_device() == 0
    check(decode(*tensors, CAUSAL, 0.1), *tensors, CAUSAL, 0.1)
