"""gdn-active-width on the real builders, run on CPU tensors against an oracle that knows only the batch.

The oracle: row i of the result is the first columns of row i of the block table; K + 1 of them if every request of the batch
verifies the same K >= 1 drafts, else N + 1; the memory is that which stock returns; everything else is what stock returns.
"""

import dataclasses
import importlib
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_verify.overlays import gdn_active_width

N, SLOTS, BLOCKS = 7, 8, 11  # draft width, request slots, columns of the block table
GDN = ("vllm.v1.attention.backends.gdn_attn", "GDNAttentionMetadataBuilder")
KIMI_NVIDIA = ("vllm.models.kimi_k3.nvidia.kda_metadata", "KimiK3KDAMetadataBuilder")
KIMI_AMD = ("vllm.models.kimi_k3.amd.kda_metadata", "KimiK3ROCmKDAMetadataBuilder")
BUILDERS = [GDN, KIMI_NVIDIA, KIMI_AMD]
BUILDER_IDS = [name for _, name in BUILDERS]


@dataclass(frozen=True)
class Row:
    """One request: its query length, and its drafts (0: decode without drafts, -1: prefill or padding)."""

    query_len: int
    drafts: int


PADDING = Row(0, -1)


def verify(width: int) -> Row:
    return Row(width + 1, width)


@st.composite
def batches(draw):
    """Rows as the runner orders them: requests first, padding behind."""
    kind = draw(st.sampled_from(["uniform", "uniform", "widths", "mixed"]))
    if kind == "uniform":
        rows = [verify(draw(st.integers(0, N)))] * draw(st.integers(1, SLOTS))
    elif kind == "widths":
        rows = draw(st.lists(st.integers(0, N).map(verify), min_size=1, max_size=SLOTS))
    else:
        prefill = st.integers(1, 20).map(lambda length: Row(length, -1))
        rows = draw(st.lists(st.one_of(st.integers(0, N).map(verify), prefill), min_size=1, max_size=SLOTS))
    padding = draw(st.sampled_from([0, 0, 0, 1, 3]))
    return tuple(rows) + (PADDING,) * min(padding, SLOTS - len(rows))


def expected_columns(rows) -> int:
    """The oracle's width: by definition, not by the overlay's arithmetic."""
    for width in range(1, N + 1):
        if all(row == verify(width) for row in rows):
            return width + 1
    return N + 1


def stage_on_cpu(**kw):
    """What the Triton kernel of that name does, after the equivalent that vLLM gives in a comment."""
    n = kw["num_spec_decodes"]
    kw["staged_state_indices"][:n].copy_(kw["state_indices"])
    kw["staged_state_indices"][n:].fill_(0)
    kw["staged_query_start_loc"][: n + 1].copy_(kw["query_start_loc"])
    kw["staged_query_start_loc"][n + 1 :].fill_(int(kw["query_start_loc"][-1]))
    kw["staged_num_accepted_tokens"][:n].copy_(kw["num_accepted_tokens"])
    kw["staged_num_accepted_tokens"][n:].fill_(1)


def chunks_on_cpu(cu_seqlens, cu_seqlens_cpu, chunk_size):
    """(sequence, chunk) of every prefill chunk, and the first chunk of every sequence."""
    counts = -(-cu_seqlens_cpu.diff() // chunk_size)
    chunks = [(i, j) for i, count in enumerate(counts.tolist()) for j in range(count)]
    return torch.tensor(chunks, dtype=cu_seqlens.dtype), torch.cat([torch.zeros(1), counts.cumsum(0)]).to(torch.int64)


@pytest.fixture
def make_builder(make_config, monkeypatch):
    def make(which, *, layers=None, mode="FULL_AND_PIECEWISE", **speculative):
        from vllm.v1.kv_cache_interface import MambaSpec

        module = importlib.import_module(which[0])
        if hasattr(module, "stage_spec_decode_metadata"):
            monkeypatch.setattr(module, "stage_spec_decode_metadata", stage_on_cpu)
        if hasattr(module, "prepare_chunk_metadata_device"):
            monkeypatch.setattr(module, "prepare_chunk_metadata_device", chunks_on_cpu)
        config = make_config(None, draft_width=N, max_num_seqs=SLOTS, mode=mode, **speculative)
        names = list(layers or {"layer": None})
        config.compilation_config.static_forward_context.update(layers or {})
        spec = MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.float32,), num_speculative_blocks=N)
        return getattr(module, which[1])(spec, names, config, torch.device("cpu"))

    return make


def inputs(rows, *, bound=None):
    """(common metadata, accepted counts, draft counts) of a batch; every slot number of the block table is unique."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    n = len(rows)
    lengths = torch.tensor([row.query_len for row in rows], dtype=torch.int32)
    start = torch.zeros(n + 1, dtype=torch.int32)
    torch.cumsum(lengths, 0, out=start[1:])
    seq_lens = lengths + 32
    fields = {
        "query_start_loc": start,
        "query_start_loc_cpu": start.clone(),
        "seq_lens": seq_lens,
        "num_reqs": n,
        "num_actual_tokens": int(start[-1]),
        "max_query_len": bound or max(int(lengths.max()), 1),
        "max_seq_len": 64,
        "block_table_tensor": 1 + torch.arange(n * BLOCKS, dtype=torch.int32).view(n, BLOCKS),
        "slot_mapping": torch.zeros(int(start[-1]), dtype=torch.int64),
        "is_prefilling": torch.tensor([row.drafts < 0 and row.query_len > 0 for row in rows]),
        "seq_lens_cpu_upper_bound": seq_lens.clone(),
        "_seq_lens_cpu": seq_lens.clone(),
    }
    known = CommonAttentionMetadata.__dataclass_fields__
    common = CommonAttentionMetadata(**{name: value for name, value in fields.items() if name in known})
    accepted = torch.tensor([1 + i % (N + 1) for i in range(n)], dtype=torch.int32)
    drafts = torch.tensor([row.drafts for row in rows], dtype=torch.int32)
    return common, accepted, drafts


def stock_build(builder):
    """vLLM's own function, whatever is applied."""
    for cls in type(builder).__mro__:
        if "build" in vars(cls):
            function = vars(cls)["build"]
            marker = getattr(function, "__dflash_verify__", None)
            return (marker.original if marker else function).__get__(builder)
    raise AssertionError


def same(a, b, where="metadata", *, but=()):
    """Equal in value, and tensors in shape, strides and type, however deep."""
    if isinstance(b, torch.Tensor):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype), where
        assert torch.equal(a, b), where
    elif dataclasses.is_dataclass(b):
        for field in dataclasses.fields(b):
            if field.name not in but:
                same(getattr(a, field.name), getattr(b, field.name), f"{where}.{field.name}")
    elif isinstance(b, dict):
        assert a.keys() == b.keys(), where
        for key in b:
            same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(b, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{where}[{i}]")
    else:
        assert type(a) is type(b), where
        assert a is b or a == b, where


def check(builder, reference, rows):
    common, accepted, drafts = inputs(rows)
    ours = builder.build(0, common, accepted, drafts)
    stock_inputs = inputs(rows)
    stock = stock_build(reference)(0, *stock_inputs)
    columns = expected_columns(rows)
    same(ours, stock, but=("spec_state_indices_tensor",))
    table, full = ours.spec_state_indices_tensor, stock.spec_state_indices_tensor
    if full is None:
        assert table is None
        return
    spec = [i for i, row in enumerate(rows) if row.drafts >= 0]
    assert table.shape == (full.shape[0], columns)
    assert table.stride() == full.stride()
    for out, i in enumerate(spec):
        assert table[out].tolist() == common.block_table_tensor[i, :columns].tolist()
    assert not table[len(spec) :].any()  # padding rows hold the NULL block, 0
    buffer = builder.spec_state_indices_tensor
    if reference.spec_state_indices_tensor.data_ptr() == full.data_ptr():
        # FULL graphs read the buffer at this address; its rows are complete whatever is shown of them.
        assert table.data_ptr() == buffer.data_ptr()
        assert table.stride() == (N + 1, 1)
        for out, i in enumerate(spec):
            assert buffer[out].tolist() == common.block_table_tensor[i, : N + 1].tolist()
    elif full.data_ptr() == stock_inputs[0].block_table_tensor.data_ptr():
        assert table.data_ptr() == common.block_table_tensor.data_ptr()


GENERATED = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    # Builders are made once for all examples, and a busy machine draws slowly.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize("which", BUILDERS, ids=BUILDER_IDS)
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE"])
def test_rows_widths_padding_addresses_and_strides(applied, make_builder, which, mode):
    builder, reference = (make_builder(which, mode=mode) for _ in range(2))

    @GENERATED
    @given(batches())
    def run(rows):
        check(builder, reference, rows)

    run()


@pytest.mark.parametrize("which", BUILDERS, ids=BUILDER_IDS)
def test_width_3_gives_exactly_4_columns(applied, make_builder, which):
    builder = make_builder(which)
    common, accepted, drafts = inputs([verify(3)] * 5)
    assert builder.build(0, common, accepted, drafts).spec_state_indices_tensor.shape == (5, 4)
    # And in the capture path, which has no draft counts of its own.
    assert builder.build_for_cudagraph_capture(inputs([verify(3)] * 5)[0]).spec_state_indices_tensor.shape == (5, 4)


@pytest.mark.parametrize("which", BUILDERS, ids=BUILDER_IDS)
def test_stock_gives_8_columns_at_width_3(make_builder, which):
    """What the overlay is for: the day this fails, vLLM narrows the rows itself."""
    common, accepted, drafts = inputs([verify(3)] * 5)
    assert make_builder(which).build(0, common, accepted, drafts).spec_state_indices_tensor.shape == (5, N + 1)


STOCK_BATCHES = {
    "prefill": [verify(3), verify(3), Row(9, -1)],
    "prefill of the same length": [verify(3), Row(4, -1)],
    "one-token prefill": [verify(3), Row(1, -1)],
    "zero-draft row": [verify(3), verify(0)],
    "padding": [verify(3), verify(3), PADDING],
    "two widths": [verify(3), verify(1)],
    "K = 0": [verify(0)] * 3,
    "full width": [verify(N)] * 3,
    "fewer drafts than tokens": [Row(4, 2)] * 3,
}


@pytest.mark.parametrize("rows", STOCK_BATCHES.values(), ids=STOCK_BATCHES.keys())
@pytest.mark.parametrize("which", BUILDERS, ids=BUILDER_IDS)
def test_everything_else_is_stock_exactly(applied, make_builder, which, rows):
    ours = make_builder(which).build(0, *inputs(rows))
    same(ours, stock_build(make_builder(which))(0, *inputs(rows)))


def test_a_capture_for_a_longer_bound_keeps_its_rows(applied, make_builder):
    common, accepted, drafts = inputs([verify(3)] * 4, bound=N + 1)
    assert make_builder(GDN).build(0, common, accepted, drafts).spec_state_indices_tensor.shape == (4, N + 1)


def test_adaptive_verification_keeps_its_rows(applied, make_builder):
    builder = make_builder(GDN, enable_adaptive_verification=True)
    assert builder.build(0, *inputs([verify(3)] * 4)).spec_state_indices_tensor.shape == (4, N + 1)


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE"])
def test_another_cache_group_gets_the_same_width_in_its_own_buffer(applied, make_builder, release, mode):
    if release < (0, 31, 0):
        pytest.skip("update_block_table exists from 0.31.0 on")
    first, second, reference = (make_builder(GDN, mode=mode) for _ in range(3))

    @GENERATED
    @given(batches())
    def run(rows):
        common, accepted, drafts = inputs(rows)
        metadata = first.build(0, common, accepted, drafts)
        table = 1000 + common.block_table_tensor
        ours = second.update_block_table(metadata, table, common.slot_mapping)
        update = type(reference).update_block_table.__dflash_verify__.original
        stock = update(reference, stock_build(first)(0, *inputs(rows)), table, common.slot_mapping)
        same(ours, stock, but=("spec_state_indices_tensor",))
        if stock.spec_state_indices_tensor is None:
            assert ours.spec_state_indices_tensor is None
            return
        spec = [i for i, row in enumerate(rows) if row.drafts >= 0]
        columns = expected_columns(rows)
        assert ours.spec_state_indices_tensor.shape == (stock.spec_state_indices_tensor.shape[0], columns)
        assert ours.spec_state_indices_tensor.stride() == stock.spec_state_indices_tensor.stride()
        for out, i in enumerate(spec):
            assert ours.spec_state_indices_tensor[out].tolist() == table[i, :columns].tolist()
        assert not ours.spec_state_indices_tensor[len(spec) :].any()
        if stock.spec_state_indices_tensor.data_ptr() == reference.spec_state_indices_tensor.data_ptr():
            assert ours.spec_state_indices_tensor.data_ptr() == second.spec_state_indices_tensor.data_ptr()

    run()


def layer(module, name, **attributes):
    """An instance of the real layer class without its weights."""
    instance = object.__new__(getattr(importlib.import_module(module), name))
    for key, value in attributes.items():
        object.__setattr__(instance, key, value)
    return instance


QWEN = ("vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn", "QwenGatedDeltaNetAttention")
KIMI_LAYER = ("vllm.models.kimi_k3.nvidia.kda", "KimiK3DeltaAttention")


@pytest.fixture
def columns_on_gpu(applied, make_builder, monkeypatch):
    """Columns that a builder of a GPU would return at width 3 for these layers (only its idea of the device is changed)."""
    monkeypatch.setattr(gdn_active_width, "_device_type", lambda builder: "cuda")

    def columns(which, **layers):
        builder = make_builder(which, layers=layers)
        return builder.build(0, *inputs([verify(3)] * 4)).spec_state_indices_tensor.shape[1]

    return columns


def test_layers_whose_kernel_needs_contiguous_rows_keep_them(columns_on_gpu, release):
    fused = "enable_fused_gdn_decode" if release < (0, 32, 0) else "enable_fused_gdn_spec_decode"
    triton, cuda = layer(*QWEN, **{fused: False}), layer(*QWEN, **{fused: True})
    assert columns_on_gpu(GDN, a=triton, b=triton) == 4
    assert columns_on_gpu(GDN, a=triton, b=cuda) == N + 1
    native, flashinfer = (layer(*KIMI_LAYER, kda_spec_decode_backend=b) for b in ("native", "flashinfer"))
    assert columns_on_gpu(KIMI_NVIDIA, a=native) == 4
    assert columns_on_gpu(KIMI_NVIDIA, a=flashinfer) == N + 1


def test_layers_on_a_cpu_keep_their_rows(applied, make_builder):
    """The CPU kernels copy the rows."""
    builder = make_builder(GDN, layers={"a": layer(*QWEN)})
    assert builder.build(0, *inputs([verify(3)] * 4)).spec_state_indices_tensor.shape[1] == N + 1


def test_the_fused_switch_of_qwen_layers_is_still_called_that(release):
    """The overlay reads these attributes; a layer without them would be taken for one that walks strides."""
    import inspect

    source = inspect.getsource(getattr(importlib.import_module(QWEN[0]), QWEN[1]).__init__)
    assert (
        "self.enable_fused_gdn_decode =" if release < (0, 32, 0) else "self.enable_fused_gdn_spec_decode ="
    ) in source
    source = inspect.getsource(importlib.import_module(KIMI_LAYER[0]))
    assert ("flashinfer_packed_fused_kda_decode(" in source) == ("self.kda_spec_decode_backend =" in source)


def test_glm_layers_are_narrowed_where_they_exist(columns_on_gpu, release):
    if release < (0, 30, 0):
        pytest.skip("GLM-5.3's KDA layer exists from 0.30.0 on")
    module = "vllm.models.glm5next.nvidia.kda" if release < (0, 31, 0) else "vllm.models.glm5next.common.kda"
    assert columns_on_gpu(GDN, a=layer(module, "Glm5NextLinearAttention")) == 4


def test_amd_kimi_layers_keep_their_rows_where_the_specialised_decode_exists(columns_on_gpu, release):
    kimi = layer("vllm.models.kimi_k3.amd.kda", "KimiK3DeltaAttention")
    assert columns_on_gpu(KIMI_AMD, a=kimi) == (4 if release < (0, 33, 0) else N + 1)


def test_an_unknown_layer_keeps_its_rows(columns_on_gpu):
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    unknown = type("CustomLayer", (MambaBase,), {"__abstractmethods__": frozenset()})
    unknown.__abstractmethods__ = frozenset()
    assert columns_on_gpu(GDN, a=object.__new__(unknown)) == N + 1
