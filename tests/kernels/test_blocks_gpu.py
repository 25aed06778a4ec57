"""Launches through kept blocks: the same bits as Triton's own launch, and only where they may."""

import threading

import pytest
import torch

from hf_attn_backends.kernels.visibility import CAUSAL, FULL, Visibility

pytestmark = pytest.mark.gpu

KINDS = ("full", "causal", "window", "intervals", "dense")


def draw(batch, heads, kv_heads, m, n, dim, dtype=torch.bfloat16):
    return [
        torch.randn(batch, length, h, dim, device="cuda").to(dtype).transpose(1, 2)
        for h, length in ((heads, m), (kv_heads, n), (kv_heads, n))
    ]


def visibility_of(kind, batch, m, n):
    if kind == "intervals":
        rows = torch.zeros(batch, m, 2, dtype=torch.int32, device="cuda")
        rows[..., 1] = torch.randint(0, n + 1, (batch, m), device="cuda")
        return Visibility(intervals=rows)
    if kind == "dense":
        return Visibility(dense=torch.rand(batch, 1, m, n, device="cuda") > 0.4)
    return {"full": FULL, "causal": CAUSAL, "window": Visibility(causal=True, window=70)}[kind]


@pytest.fixture
def blocks(monkeypatch):
    """No blocks yet; the list of those that were launched."""
    from hf_attn_backends.kernels import block
    from hf_attn_backends.kernels.triton import launch

    launched = []
    plain = block.Block.launch

    def counted(self, *arguments):
        launched.append(self)
        plain(self, *arguments)

    monkeypatch.setattr(launch, "_BLOCKS", {})
    monkeypatch.setattr(block.Block, "launch", counted)
    return launched


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_the_portable_forward(kind, dtype, blocks):
    from hf_attn_backends.kernels.triton.forward import launch_forward

    calls = []
    for m, n in ((130, 190), (77, 333), (77, 333)):
        tensors, visibility = draw(2, 8, 2, m, n, 64, dtype), visibility_of(kind, 2, m, n)
        calls.append((tensors, visibility, launch_forward(*tensors, visibility, 0.125)))
    assert len(blocks) == 2
    blocks.clear()
    from hf_attn_backends.kernels.triton import launch

    for tensors, visibility, (out, lse) in calls:
        launch._BLOCKS.clear()  # through Triton now
        again = launch_forward(*tensors, visibility, 0.125)
        assert torch.equal(out, again[0])
        assert torch.equal(lse, again[1])
    assert blocks == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_portable_backward_without_descriptors(kind, blocks):
    from hf_attn_backends.kernels.triton import launch
    from hf_attn_backends.kernels.triton.backward import launch_backward
    from hf_attn_backends.kernels.triton.forward import launch_forward

    calls = []
    for _ in range(2):
        tensors, visibility = draw(2, 8, 2, 77, 133, 64), visibility_of(kind, 2, 77, 133)
        out, lse = launch_forward(*tensors, visibility, 0.125)
        given = (torch.randn_like(out), *tensors, out, lse, visibility, 0.125)
        calls.append((given, launch_backward(*given, descriptors=False)))
    assert len(blocks) == 4  # the second call's: forward, delta, dkdv, dq
    for given, grads in calls:
        launch._BLOCKS.clear()
        for one, two in zip(grads, launch_backward(*given, descriptors=False), strict=True):
            assert torch.equal(one, two)
    assert len(blocks) == 4


def test_features_and_their_pointers(blocks):
    from hf_attn_backends.kernels.triton.forward import launch_forward

    tensors = draw(1, 8, 2, 100, 100, 128)
    options = {
        "softcap": 2.0, "sinks": torch.randn(8, device="cuda"), "dropout_p": 0.25,
        "seed": torch.tensor([7], device="cuda"),
    }  # fmt: skip
    runs = [launch_forward(*tensors, CAUSAL, 0.1, **options) for _ in range(2)]
    assert len(blocks) == 1
    assert torch.equal(runs[0][0], runs[1][0])
    other = launch_forward(*tensors, CAUSAL, 0.1, **{**options, "seed": options["seed"] + 1})
    assert len(blocks) == 2
    assert not torch.equal(runs[0][0], other[0])


@pytest.mark.parametrize("kind", KINDS[:4])
def test_decoding_a_growing_cache(kind, blocks):
    from hf_attn_backends.kernels.triton import launch
    from hf_attn_backends.kernels.triton.decode import launch_decode

    calls = []
    for n in (1000, 1001, 1002, 1090, 5000):
        tensors, visibility = draw(2, 32, 8, 1, n, 128), visibility_of(kind, 2, 1, n)
        tensors[1:] = [t.contiguous() for t in tensors[1:]]  # strides that grow with the cache
        calls.append((tensors, visibility, launch_decode(*tensors, visibility, 0.09)))
    assert len(blocks) >= 6  # two kernels a call, but for the first of each number of splits
    for tensors, visibility, (out, lse) in calls:
        launch._BLOCKS.clear()
        again = launch_decode(*tensors, visibility, 0.09)
        assert torch.equal(out, again[0])
        assert torch.equal(lse, again[1])


def test_another_class_of_strides_or_addresses_goes_through_triton(blocks):
    from hf_attn_backends.kernels.triton.forward import launch_forward
    from hf_attn_backends.reference import attention_reference

    plain = draw(1, 4, 2, 64, 64, 64)
    for _ in range(2):
        launch_forward(*plain, CAUSAL, 0.125)
    assert len(blocks) == 1
    memory = torch.randn(64 * 4 * 72 + 1, device="cuda", dtype=torch.bfloat16)
    odd = memory[1:].view(1, 64, 4, 72)[..., :64].transpose(1, 2)  # 2 bytes off; strides of 72
    for _ in range(2):
        out, _ = launch_forward(odd, *plain[1:], CAUSAL, 0.125)
    assert len(blocks) == 1
    want, _ = attention_reference(odd, *plain[1:], visibility=CAUSAL, scale=0.125)
    assert float((out.double() - want).abs().max()) < 2e-2


def test_threads_and_streams_do_not_mix_their_arguments(blocks):
    from hf_attn_backends.kernels.triton.decode import launch_decode

    calls = [draw(1, 8, 2, 1, 500 + 10 * i, 128) for i in range(4)]
    want = [launch_decode(*tensors, CAUSAL, 0.1)[0].clone() for tensors in calls]
    torch.cuda.synchronize()
    wrong = []

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(200):
                if not torch.equal(launch_decode(*calls[i], CAUSAL, 0.1)[0], want[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert wrong == []
    assert len(blocks) >= 800


def test_a_captured_graph_replays_them(blocks):
    from hf_attn_backends.kernels.triton.decode import launch_decode

    tensors = draw(1, 8, 2, 1, 700, 128)
    for _ in range(2):
        launch_decode(*tensors, CAUSAL, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = launch_decode(*tensors, CAUSAL, 0.1)
    tensors[0].copy_(torch.randn_like(tensors[0]))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, launch_decode(*tensors, CAUSAL, 0.1)[0])
