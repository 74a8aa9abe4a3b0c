"""Typed PTX intrinsics for numba.cuda: every machine instruction that numba itself does not offer.

`ptx(assembly, result, *parameters)` makes a function that kernels call; it becomes one line of LLVM inline assembly, so it
costs nothing at run time. Operands are numbered results first, then parameters, tuples flattened. Names follow the PTX
manual. Addresses of global memory are u64, of shared memory u32 (the shared window's own 32-bit addresses).

Facts that each cost a morning: a plain Python integer types as int64, so write i32(4) or u32(4) in index arithmetic;
`cuda.local.array` with constant indices in constant-trip loops stays in registers; 16-bit floats travel as their bits.
"""

import functools

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from zhilight.driver.dtype import DType

u16, u32, u64 = types.uint16, types.uint32, types.uint64
i32, i64, f32, f64, void = types.int32, types.int64, types.float32, types.float64, types.void
U2, U4, F2, F4 = types.UniTuple(u32, 2), types.UniTuple(u32, 4), types.UniTuple(f32, 2), types.UniTuple(f32, 4)

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_OPERAND = {u16: (_I16, "h"), u32: (_I32, "r"), i32: (_I32, "r"), u64: (_I64, "l"), i64: (_I64, "l"), f32: (_F32, "f")}


def _flatten(kind):
    if isinstance(kind, types.UniTuple):
        return [kind.dtype] * kind.count
    if isinstance(kind, types.BaseTuple):
        return list(kind.types)
    return [] if kind == types.void else [kind]


def assemble(builder, assembly, results, arguments, argument_types, tied=0, memory=True):
    """Emit one inline assembly from inside an intrinsic's generator; returns its LLVM value."""
    outputs = ["=" + _OPERAND[t][1] for t in results]
    inputs = [str(i) if i < tied else _OPERAND[t][1] for i, t in enumerate(argument_types)]
    constraints = ",".join(outputs + inputs + (["~{memory}"] if memory else []))
    if not results:
        result = ir.VoidType()
    elif len(results) == 1:
        result = _OPERAND[results[0]][0]
    else:
        result = ir.LiteralStructType([_OPERAND[t][0] for t in results])
    function = ir.FunctionType(result, [_OPERAND[t][0] for t in argument_types])
    return builder.call(ir.InlineAsm(function, assembly, constraints, side_effect=memory), arguments)


def ptx(assembly, result, *parameters, memory=True, tied=0):
    """An intrinsic of a fixed signature that emits `assembly`.

    memory: it reads or writes memory or has another side effect, so it must not be moved or dropped.
    tied: the first `tied` flattened arguments share the registers of the first `tied` results (accumulators).
    """
    results = _flatten(result)

    def generate(context, builder, signature, arguments):
        flat, kinds = [], []
        for argument, kind in zip(arguments, signature.args):
            if isinstance(kind, types.BaseTuple):
                for i, element in enumerate(_flatten(kind)):
                    flat.append(builder.extract_value(argument, i))
                    kinds.append(element)
            else:
                flat.append(argument)
                kinds.append(kind)
        value = assemble(builder, assembly, results, flat, kinds, tied, memory)
        if not results:
            return context.get_dummy_value()
        if not isinstance(result, types.BaseTuple):
            return value
        out = ir.Constant(context.get_value_type(result), ir.Undefined)
        for i in range(len(results)):
            out = builder.insert_value(out, builder.extract_value(value, i), i)
        return out

    # numba asks the typing function for its argument names, so it must have exactly as many as the instruction
    names = ", ".join(f"a{i}" for i in range(len(parameters)))
    scope = {"signature": result(*parameters), "generate": generate}
    exec(f"def typing(context{', ' if parameters else ''}{names}):\n    return signature, generate\n", scope)
    return intrinsic(scope["typing"])


# ---- addresses ------------------------------------------------------------------------------------------------------


@intrinsic
def shared_address(typingctx, array):
    """The 32-bit shared-window address of a cuda.shared.array."""
    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return assemble(builder, "{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }", [u32],
                         [builder.ptrtoint(data, _I64)], [u64], 0, False)

    return u32(array), generate


@intrinsic
def address(typingctx, pointer):
    """The global address (u64) of a Pointer parameter. Add byte offsets in 64 bits: tokens * hidden passes 2^31."""
    def generate(context, builder, signature, arguments):
        return builder.ptrtoint(arguments[0], _I64)

    return u64(pointer), generate


# ---- loads and stores -----------------------------------------------------------------------------------------------

load_global_b16 = ptx("{ .reg .u16 t; ld.global.u16 t, [$1]; cvt.u32.u16 $0, t; }", u32, u64)
load_global_b32 = ptx("ld.global.u32 $0, [$1];", u32, u64)
load_global_v2 = ptx("ld.global.v2.u32 {$0,$1}, [$2];", U2, u64)
load_global_v4 = ptx("ld.global.v4.u32 {$0,$1,$2,$3}, [$4];", U4, u64)
load_stream_v4 = ptx("ld.global.nc.L1::no_allocate.v4.u32 {$0,$1,$2,$3}, [$4];", U4, u64)
"""16 bytes that are read once: not kept in L1."""
load_global_f32x4 = ptx("ld.global.v4.f32 {$0,$1,$2,$3}, [$4];", F4, u64)
load_once_v4 = ptx("ld.global.L1::no_allocate.v4.u32 {$0,$1,$2,$3}, [$4];", U4, u64)
"""As load_stream_v4, for what an earlier kernel may still have been writing when this one started (dependent launch)."""
store_global_b16 = ptx("{ .reg .u16 t; cvt.u16.u32 t, $1; st.global.u16 [$0], t; }", void, u64, u32)
store_global_b32 = ptx("st.global.u32 [$0], $1;", void, u64, u32)
store_global_f32 = ptx("st.global.f32 [$0], $1;", void, u64, f32)
store_global_v2 = ptx("st.global.v2.u32 [$0], {$1,$2};", void, u64, u32, u32)
store_global_v4 = ptx("st.global.v4.u32 [$0], {$1,$2,$3,$4};", void, u64, u32, u32, u32, u32)
load_global_f32x2 = ptx("ld.global.v2.f32 {$0,$1}, [$2];", F2, u64)
store_global_f32x2 = ptx("st.global.v2.f32 [$0], {$1,$2};", void, u64, f32, f32)
store_global_f32x4 = ptx("st.global.v4.f32 [$0], {$1,$2,$3,$4};", void, u64, f32, f32, f32, f32)
load_shared_b32 = ptx("ld.shared.u32 $0, [$1];", u32, u32)
load_shared_f32 = ptx("ld.shared.f32 $0, [$1];", f32, u32)
load_shared_v2 = ptx("ld.shared.v2.u32 {$0,$1}, [$2];", U2, u32)
store_shared_b16 = ptx("{ .reg .u16 t; cvt.u16.u32 t, $1; st.shared.u16 [$0], t; }", void, u32, u32)
load_shared_v4 = ptx("ld.shared.v4.u32 {$0,$1,$2,$3}, [$4];", U4, u32)
load_shared_f32x4 = ptx("ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];", F4, u32)
store_shared_b32 = ptx("st.shared.u32 [$0], $1;", void, u32, u32)
store_shared_f32 = ptx("st.shared.f32 [$0], $1;", void, u32, f32)
store_shared_v4 = ptx("st.shared.v4.u32 [$0], {$1,$2,$3,$4};", void, u32, u32, u32, u32, u32)

atomic_inc_acq_rel_u32 = ptx("atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;", u32, u64, u32)
"""Counts to $2 and wraps to 0, so that a counter is ready for the next launch without a memset."""
reduce_add_f32 = ptx("red.global.gpu.add.f32 [$0], $1;", void, u64, f32)
reduce_add_u32 = ptx("red.global.gpu.add.u32 [$0], $1;", void, u64, u32)
fence_gpu = ptx("fence.acq_rel.gpu;", void)

# ---- bits and numbers -----------------------------------------------------------------------------------------------

float_of_bits = ptx("mov.b32 $0, $1;", f32, u32, memory=False)
bits_of_float = ptx("mov.b32 $0, $1;", u32, f32, memory=False)
exp2_approx = ptx("ex2.approx.ftz.f32 $0, $1;", f32, f32, memory=False)
log2_approx = ptx("lg2.approx.ftz.f32 $0, $1;", f32, f32, memory=False)
rsqrt_approx = ptx("rsqrt.approx.ftz.f32 $0, $1;", f32, f32, memory=False)
reciprocal_approx = ptx("rcp.approx.ftz.f32 $0, $1;", f32, f32, memory=False)

_pack_bf16 = ptx("cvt.rn.bf16x2.f32 $0, $2, $1;", u32, f32, f32, memory=False)
_pack_fp16 = ptx("cvt.rn.f16x2.f32 $0, $2, $1;", u32, f32, f32, memory=False)
_unpack_bf16 = ptx("{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }", F2, u32, memory=False)
_unpack_fp16 = ptx("{ .reg .f16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }", F2, u32, memory=False)


def pack(dtype: DType):
    """(low, high) float32 -> two 16-bit floats in a u32, rounded to nearest even."""
    return {"bfloat16": _pack_bf16, "float16": _pack_fp16}[dtype.name]


def unpack(dtype: DType):
    """u32 of two 16-bit floats -> (low, high) float32."""
    return {"bfloat16": _unpack_bf16, "float16": _unpack_fp16}[dtype.name]


# ---- warp and block -------------------------------------------------------------------------------------------------

FULL_WARP = 0xFFFFFFFF


def _shuffle_u64(mode: str, clamp: int):
    """Both halves of a 64-bit value through the warp; numba's own shuffles know no uint64."""
    move = "; ".join(f"shfl.sync.{mode}.b32 {half}, {half}, $2, {clamp}, 0xffffffff" for half in ("lo", "hi"))
    return ptx("{ .reg .b32 lo, hi; mov.b64 {lo, hi}, $1; " + move + "; mov.b64 $0, {lo, hi}; }", u64, u64, u32)


shuffle_xor_u64 = _shuffle_u64("bfly", 31)
shuffle_up_u64 = _shuffle_u64("up", 0)
shuffle_u64 = _shuffle_u64("idx", 31)
named_barrier = ptx("bar.sync $0, $1;", void, u32, u32)
"""Barrier number (1 to 15) for that many threads."""
named_barrier_arrive = ptx("bar.arrive $0, $1;", void, u32, u32)
grid_dependency_wait = ptx("griddepcontrol.wait;", void)
"""Programmatic dependent launch: wait until the kernel before has ended and its writes are visible. sm_90."""
grid_dependency_launch = ptx("griddepcontrol.launch_dependents;", void)
"""Let the next kernel's blocks start as this kernel's leave. sm_90."""


def set_max_registers(count: int, increase: bool):
    """setmaxnreg for the calling warpgroup. The sum over the SM must fit 64K registers, or the kernel hangs. sm_90a."""
    return ptx(f"setmaxnreg.{'inc' if increase else 'dec'}.sync.aligned.u32 {count};", void)


# ---- asynchronous copies --------------------------------------------------------------------------------------------

cp_async_16 = ptx("cp.async.cg.shared.global [$0], [$1], 16;", void, u32, u64)
cp_async_16_zfill = ptx("cp.async.cg.shared.global [$0], [$1], 16, $2;", void, u32, u64, u32)
"""Copies $2 bytes (0 or 16) and fills the rest with zeros."""
cp_async_commit = ptx("cp.async.commit_group;", void)


@functools.cache
def cp_async_wait(pending: int):
    """Wait until at most `pending` groups are under way."""
    return ptx(f"cp.async.wait_group {pending};", void)


mbarrier_init = ptx("mbarrier.init.shared.b64 [$0], $1;", void, u32, u32)
mbarrier_expect = ptx("mbarrier.arrive.expect_tx.shared.b64 _, [$0], $1;", void, u32, u32)
mbarrier_arrive = ptx("mbarrier.arrive.shared.b64 _, [$0];", void, u32)
mbarrier_arrive_cluster = ptx(
    "{ .reg .b32 t; mapa.shared::cluster.u32 t, $0, $1; mbarrier.arrive.shared::cluster.b64 _, [t]; }", void, u32, u32)
"""Arrive at the barrier of the same address in block $1 of the cluster."""
cluster_address = ptx("mapa.shared::cluster.u32 $0, $1, $2;", u32, u32, u32, memory=False)
"""The cluster-wide address of shared address $1 in block $2 of the cluster."""
load_cluster_f32x4 = ptx("ld.shared::cluster.v4.f32 {$0,$1,$2,$3}, [$4];", F4, u32)
mbarrier_wait = ptx("{ .reg .pred p; WAIT_${:uid}: mbarrier.try_wait.parity.shared.b64 p, [$0], $1; @p bra DONE_${:uid}; "
                    "bra WAIT_${:uid}; DONE_${:uid}: }", void, u32, u32)
fence_mbarrier_init = ptx("fence.mbarrier_init.release.cluster;", void)
fence_async_shared = ptx("fence.proxy.async.shared::cta;", void)
"""Ordinary stores to shared memory become visible to the copy engine and to wgmma."""
cluster_arrive = ptx("barrier.cluster.arrive.release.aligned;", void)
cluster_wait = ptx("barrier.cluster.wait.acquire.aligned;", void)
cluster_rank = ptx("mov.u32 $0, %cluster_ctarank;", u32, memory=False)

_LOAD = "cp.async.bulk.tensor.{n}d.shared::cluster.global.mbarrier::complete_tx::bytes"
bulk_load_2d = ptx(_LOAD.format(n=2) + " [$0], [$1, {$3, $4}], [$2];", void, u32, u64, u32, i32, i32)
"""(shared address, tensor map, mbarrier, x, y): x is the innermost coordinate, in elements."""
bulk_load_2d_multicast = ptx(
    "{ .reg .u16 m; cvt.u16.u32 m, $5; " + _LOAD.format(n=2) + ".multicast::cluster [$0], [$1, {$3, $4}], [$2], m; }",
    void, u32, u64, u32, i32, i32, u32)
"""The last argument is the mask of the cluster's blocks that receive the tile, at the same shared address."""
prefetch_tensor_map = ptx("prefetch.tensormap [$0];", void, u64)


@functools.cache
def bulk_wait_read(pending: int):
    """Wait until at most `pending` committed bulk stores still read shared memory."""
    return ptx(f"cp.async.bulk.wait_group.read {pending};", void)


# ---- tensor cores ---------------------------------------------------------------------------------------------------

load_matrix_x4 = ptx("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];", U4, u32)
_SHORT = {"bfloat16": "bf16", "float16": "f16"}


@functools.cache
def mma_m16n8k16(dtype: DType):
    """mma.sync: (a0..a3, b0, b1, c0..c3) -> c: D[16,8] = A[16,16] B[16,8] + C in float32.

    Lane l = 4 g + c: a0 = A[g, 2c..], a1 = A[g+8, 2c..], a2 = A[g, 2c+8..], a3 = A[g+8, 2c+8..]; b0 = B[2c.., g],
    b1 = B[2c+8.., g]; c0, c1 = C[g, 2c], C[g, 2c+1]; c2, c3 the same in row g+8.
    """
    short = _SHORT[dtype.name]
    return ptx(f"mma.sync.aligned.m16n8k16.row.col.f32.{short}.{short}.f32 {{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9}}, "
               "{$10,$11,$12,$13};", F4, u32, u32, u32, u32, u32, u32, f32, f32, f32, f32, memory=False)


wgmma_fence = ptx("wgmma.fence.sync.aligned;", void)
wgmma_commit = ptx("wgmma.commit_group.sync.aligned;", void)


@functools.cache
def wgmma_wait(pending: int):
    """Wait until at most `pending` committed wgmma groups are under way."""
    return ptx(f"wgmma.wait_group.sync.aligned {pending};", void)


def accumulator(n: int):
    """The type of a warpgroup's m64 x n float32 accumulator: n / 2 values a thread.

    Thread t of the warpgroup, warp w, lane 4 g + c: value 4 j + 2 h + e is row 16 w + g + 8 h, column 8 j + 2 c + e.
    """
    return types.UniTuple(f32, n // 2)


@functools.cache
def zeros(n: int):
    """A zero accumulator of m64 x n."""
    kind = accumulator(n)

    @intrinsic
    def make(typingctx):
        def generate(context, builder, signature, arguments):
            return ir.Constant(context.get_value_type(kind), [0.0] * kind.count)

        return kind(), generate

    return make


@functools.cache
def wgmma_shared(n: int, dtype: DType, transpose_b: bool = False):
    """wgmma m64 n k16, A and B in shared memory: (accumulator, descriptor A, descriptor B, keep) -> accumulator.

    keep 0 starts from zero. A is K-major; B is K-major ([n, k] rows), or MN-major ([k, n] rows) with transpose_b.
    """
    short, count = _SHORT[dtype.name], n // 2
    outputs = ",".join(f"${i}" for i in range(count))
    first = 2 * count
    return ptx(f"{{ .reg .pred p; setp.ne.b32 p, ${first + 2}, 0; "
               f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{short}.{short} "
               f"{{{outputs}}}, ${first}, ${first + 1}, p, 1, 1, 0, {int(transpose_b)}; }}",
               accumulator(n), accumulator(n), u64, u64, i32, tied=count)


@functools.cache
def insert(kind):
    """(tuple, constant index, value) -> the tuple with that element replaced; the index must be a literal."""
    @intrinsic
    def replace(typingctx, values, index, value):
        position = index.literal_value

        def generate(context, builder, signature, arguments):
            return builder.insert_value(arguments[0], arguments[2], position)

        return values(values, index, value), generate

    return replace


def shared_tensor_descriptor(stride_bytes: int):
    """u32 shared address -> wgmma matrix descriptor of a tile of 128-byte rows with the 128-byte swizzle.

    stride_bytes: from one group of 8 rows to the next (1024 for a tile 64 16-bit values wide). The tile's address must be a
    multiple of 1024; within a row, step k16 adds 32 bytes, that is 2 to the descriptor.
    """
    high = (1 << 16) | ((stride_bytes >> 4) << 32) | (1 << 62)

    return ptx("{ .reg .u32 t; .reg .u64 w; and.b32 t, $1, 0x3ffff; shr.u32 t, t, 4; cvt.u64.u32 w, t; "
               f"or.b64 $0, w, {high}; }}", u64, u32, memory=False)
