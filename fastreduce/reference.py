"""What the kernels compute, in plain torch: the same bits, one line per idea, no speed.

Every function takes the tensors of all ranks, in rank order, and returns what each rank gets.
This module imports nothing of fastreduce.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ACCUMULATOR = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int32: torch.int64,
    torch.int64: torch.int64,
    torch.uint8: torch.int32,
}

Combine = Callable[[Tensor, Tensor], Tensor]


def _minimum(a: Tensor, b: Tensor) -> Tensor:
    """A NaN on either side wins; of two equal values (-0.0 and 0.0) the first stays."""
    return torch.where((b < a) | torch.isnan(b), b, a)


def _maximum(a: Tensor, b: Tensor) -> Tensor:
    return torch.where((b > a) | torch.isnan(b), b, a)


COMBINE: dict[str, Combine] = {
    "sum": torch.add,
    "mean": torch.add,
    "min": _minimum,
    "max": _maximum,
}


def tree(values: Sequence[Tensor], combine: Combine = torch.add) -> Tensor:
    """Neighbours pairwise, level by level, an odd one out carried up."""
    level = list(values)
    while len(level) > 1:
        pairs = [combine(a, b) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


Scales = float | Sequence[float]


def _load(inputs: Sequence[Tensor], scale: Scales) -> list[Tensor]:
    """A factor of 0 drops an input, whatever it holds."""
    scales = [scale] * len(inputs) if isinstance(scale, (int, float)) else scale
    loaded = []
    for tensor, factor in zip(inputs, scales, strict=True):
        accumulator = tensor.to(ACCUMULATOR[tensor.dtype])
        if factor == 0:
            accumulator = torch.zeros_like(accumulator)
        elif tensor.dtype.is_floating_point:
            accumulator = accumulator * torch.tensor(factor, dtype=accumulator.dtype)
        loaded.append(accumulator)
    return loaded


def _store(total: Tensor, op: str, weights: Sequence[float], dtype: torch.dtype) -> Tensor:
    """The mean in the accumulator, then the one rounding."""
    divisor = tree([torch.tensor(float(weight), dtype=torch.float64) for weight in weights])
    if op == "mean" and dtype.is_floating_point:
        total = total * (1 / divisor if divisor != 0 else divisor).to(total.dtype)
    elif op == "mean":
        total = torch.div(total, int(divisor), rounding_mode="trunc")
    return total.to(dtype)


def all_reduce(
    inputs: Sequence[Tensor],
    op: str = "mean",
    scale: Scales = 1.0,
    weights: Sequence[float] | None = None,
) -> Tensor:
    """The result of one_shot and two_shot on every rank.

    Args:
        inputs: one tensor per rank, equal shapes and dtypes.
        op: ``sum``, ``mean``, ``min`` or ``max``.
        scale: factor on every input, or one for each, in the accumulator.
        weights: each rank's part of the divisor of a mean, 1 by default.
    """
    total = tree(_load(inputs, scale), COMBINE[op])
    return _store(total, op, weights or [1.0] * len(inputs), inputs[0].dtype)


def chunk_of(count: int, world_size: int, rank: int, item_bytes: int) -> slice:
    """The elements of a flat buffer that ``rank`` reduces: cut on cache lines of 64 bytes, the
    first chunks the longer ones."""
    grain = 64 // item_bytes
    each, longer = divmod(-(-count // grain), world_size)
    first = rank * each + min(rank, longer)
    last = first + each + (rank < longer)
    return slice(min(first * grain, count), min(last * grain, count))


def ring_all_reduce(
    inputs: Sequence[Tensor],
    op: str = "mean",
    scale: Scales = 1.0,
    weights: Sequence[float] | None = None,
) -> Tensor:
    """The result of ring on every rank: chunk c begins at rank c + 1 and goes round to c."""
    world_size = len(inputs)
    flat = _load([x.reshape(-1) for x in inputs], scale)
    result = torch.empty_like(inputs[0]).reshape(-1)
    for chunk in range(world_size):
        part = chunk_of(result.numel(), world_size, chunk, result.element_size())
        order = [(chunk + 1 + hop) % world_size for hop in range(world_size)]
        total = flat[order[0]][part]
        for rank in order[1:]:
            total = COMBINE[op](total, flat[rank][part])
        result[part] = _store(total, op, weights or [1.0] * world_size, result.dtype)
    return result.reshape(inputs[0].shape)


def reduce_scatter(inputs: Sequence[Tensor], op: str = "mean", scale: Scales = 1.0) -> list[Tensor]:
    """Rank r gets the r-th of ``world_size`` equal parts (along dim 0) of the reduction."""
    return list(all_reduce(inputs, op, scale).chunk(len(inputs)))


def all_gather(inputs: Sequence[Tensor]) -> Tensor:
    """All ranks' tensors, in rank order, along dim 0."""
    return torch.cat(list(inputs))


def convert(tensor: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Cast and scale as pack and unpack do: in float64 if either side is float64, else in
    float32, rounded once (through float32 between float64 and a 16-bit type)."""
    if tensor.dtype == dtype and scale == 1.0:
        return tensor.clone()
    wide = torch.float64 if torch.float64 in (tensor.dtype, dtype) else torch.float32
    scaled = tensor.to(wide) * torch.tensor(scale, dtype=wide)
    return scaled.to(torch.float32).to(dtype) if dtype.itemsize == 2 else scaled.to(dtype)


# -- wire formats ---------------------------------------------------------------------------------

# Elements in a byte, bits, and the largest value over the scale; onebit's scale is a mean.
_CODES = {
    "fp8_e4m3": (1, 8, 448.0),
    "fp8_e5m2": (1, 8, 57344.0),
    "int8": (1, 8, 127.0),
    "int4": (2, 4, 7.0),
    "onebit": (8, 1, None),
}
_FLOATS = {  # bits of exponent and mantissa, the largest code
    "fp16": (5, 10, 0x7BFF),
    "fp8_e4m3": (4, 3, 0x7E),
    "fp8_e5m2": (5, 2, 0x7B),
}
_WORD = 0xFFFFFFFF
_NAN, _INFINITY = 0x7FC00000, 0x7F800000


def philox(key: tuple[int, int], counter: Sequence[Tensor | int]) -> list[Tensor]:
    """Philox4x32-10 (Salmon et al. 2011): four int64 tensors of words 0 to 2^32 - 1, for a counter
    of four words, tensors or numbers."""
    c0, c1, c2, c3 = torch.broadcast_tensors(
        *(torch.as_tensor(c, dtype=torch.int64) for c in counter)
    )
    k0, k1 = key
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # modulo 2^64; shifts keep the sign
        c0, c1, c2, c3 = (
            ((b >> 32) & _WORD) ^ c1 ^ k0,
            b & _WORD,
            ((a >> 32) & _WORD) ^ c3 ^ k1,
            a & _WORD,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return [c0, c1, c2, c3]


def noise(seed: int, key: int, step: int, stream: int, count: int) -> Tensor:
    """The random words of a parameter's elements 0 to ``count`` - 1."""
    index = torch.arange((count + 3) // 4)
    low = (seed & _WORD) ^ key
    words = philox((low, seed >> 32 & _WORD), (index & _WORD, index >> 32, step & _WORD, stream))
    return torch.stack(words, 1).reshape(-1)[:count]


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int32).to(torch.int64) & _WORD


def _floats(bits: Tensor) -> Tensor:
    signed = torch.where(bits >= 1 << 31, bits - (1 << 32), bits)
    return signed.to(torch.int32).view(torch.float32)


def _uniform(words: Tensor) -> Tensor:
    return (words >> 8).to(torch.float32) * 2.0**-24


def _drop(magnitude: Tensor, bits: int, words: Tensor | None) -> Tensor:
    """A magnitude's bits without the lowest ones, rounded."""
    if words is None:
        return (magnitude + (1 << (bits - 1)) - 1 + ((magnitude >> bits) & 1)) >> bits
    return (magnitude + (words >> (32 - bits))) >> bits


def _small_float(values: Tensor, format: str, words: Tensor | None) -> Tensor:
    """Finite values in a small type: its bits; what is larger than the largest is clipped to it."""
    exponent, mantissa, largest = _FLOATS[format]
    bias, dropped = (1 << (exponent - 1)) - 1, 23 - mantissa
    magnitude = _bits(values.abs())
    normal = _drop(magnitude, dropped, words) - ((127 - bias) << mantissa)
    small = values.abs().double() * 2.0 ** (bias - 1 + mantissa)  # exact
    subnormal = small.round() if words is None else (small.float() + _uniform(words)).floor()
    tiny = magnitude < (128 - bias) << 23
    code = torch.where(
        tiny, subnormal.nan_to_num().clamp(max=float(largest)).to(torch.int64), normal
    )
    return code.clamp(max=largest) | (_bits(values) >> 31) << (exponent + mantissa)


def _large_value(code: Tensor, format: str) -> Tensor:
    exponent, mantissa, _ = _FLOATS[format]
    bias = (1 << (exponent - 1)) - 1
    magnitude, sign = code & ((1 << (exponent + mantissa)) - 1), code >> (exponent + mantissa)
    normal = _floats((magnitude << (23 - mantissa)) + ((127 - bias) << 23))
    subnormal = magnitude.to(torch.float32) * 2.0 ** (1 - bias - mantissa)
    value = torch.where(magnitude < 1 << mantissa, subnormal, normal)
    return torch.where(sign == 1, -value, value)


def _scale(run: Tensor, format: str) -> Tensor:
    """Of a run of float32; NaN if it holds one, or an infinity."""
    if not run.isfinite().all():
        return torch.tensor(math.nan)
    largest = _CODES[format][2]
    if largest is None:
        parts = torch.zeros(32)
        for row in run.abs().split(32):  # 32 sums, and then a tree
            parts[: len(row)] += row
        while len(parts) > 1:
            parts = parts[: len(parts) // 2] + parts[len(parts) // 2 :]
        return (parts[0] / len(run)).clamp(max=torch.finfo(torch.float32).max)
    scale = run.abs().max() / largest
    if (scale * largest).isinf():
        scale = torch.nextafter(scale, torch.tensor(0.0))
    return scale


def encode_run(run: Tensor, format: str, words: Tensor | None = None) -> Tensor:
    """The record of at most 1,024 float32: uint8.

    Args:
        format: a wire format's name.
        words: random words, for stochastic rounding.
    """
    if format == "fp32":
        return run.view(torch.uint8).clone()
    if format in ("bf16", "fp16"):
        magnitude, sign = _bits(run.abs()), _bits(run) >> 31
        if format == "bf16":
            finite = _drop(magnitude, 16, words).clamp(max=0x7F7F) | sign << 15
            special = magnitude >> 16 | torch.where(magnitude > _INFINITY, 0x40, 0)
        else:
            finite = _small_float(run, "fp16", words)
            special = torch.where(magnitude > _INFINITY, 0x7E00, 0x7C00)
        code = torch.where(magnitude >= _INFINITY, special | sign << 15, finite)
        bytes_ = torch.stack([code & 255, code >> 8], 1).reshape(-1)
        return _padded(bytes_.to(torch.uint8))
    planes, bits, _ = _CODES[format]
    units = -(-len(run) // planes)
    scale = _scale(run, format)
    code = torch.zeros(len(run), dtype=torch.int64)
    if scale > 0:
        if format == "onebit":
            code = _bits(run) >> 31
        elif format.startswith("fp8"):
            code = _small_float(run / scale, format, words)
        else:
            most = (1 << (bits - 1)) - 1
            whole = (
                (run / scale).round()
                if words is None
                else ((run / scale + 128.0) + _uniform(words)).floor() - 128
            )
            code = whole.clamp(-most, most).to(torch.int64) & ((1 << bits) - 1)
    code = torch.cat([code, code.new_zeros(units * planes - len(run))]).view(planes, units)
    packed = sum(code[b] << (b * bits) for b in range(planes))
    return torch.cat([scale.reshape(1).view(torch.uint8), _padded(packed.to(torch.uint8))])  # type: ignore[union-attr]


def _padded(record: Tensor) -> Tensor:
    return torch.cat([record, record.new_zeros(-len(record) % 4)])


def decode_run(record: Tensor, format: str, count: int) -> Tensor:
    """``count`` float32 out of a record."""
    if format == "fp32":
        return record.clone().view(torch.float32)[:count]
    if format in ("bf16", "fp16"):
        dtype = torch.bfloat16 if format == "bf16" else torch.float16
        return record.clone().view(dtype)[:count].float()
    planes, bits, _ = _CODES[format]
    units = -(-count // planes)
    scale, unit = record[:4].clone().view(torch.float32), record[4 : 4 + units].to(torch.int64)
    code = torch.cat([unit >> (b * bits) & ((1 << bits) - 1) for b in range(planes)])[:count]
    if format == "onebit":
        value = 1.0 - 2.0 * code
    elif format.startswith("fp8"):
        value = _large_value(code, format)
    else:
        value = torch.where(code >= 1 << (bits - 1), code - (1 << bits), code).float()
    return value * scale


def absent_run(format: str, count: int) -> Tensor:
    """The record of a rank that has nothing to send."""
    if format in ("fp32", "bf16", "fp16"):
        return encode_run(torch.full((count,), -0.0), format)
    record = encode_run(torch.zeros(count), format)
    record[3] = 0x80
    return record


def is_absent(record: Tensor, format: str, count: int) -> bool:
    """Whether it is one of those."""
    if format in ("fp32", "bf16", "fp16"):
        return bool((_bits(decode_run(record, format, count)) == 1 << 31).all())
    return bool(_bits(record[:4].clone().view(torch.float32)) == 1 << 31)


@dataclass
class Encoded:
    """What :func:`all_reduce_encoded` gives: the gradient on every rank; each rank's new residual;
    and the one of the reducing ranks, together."""

    gradient: Tensor
    sent: list[Tensor]
    reduced: Tensor


def all_reduce_encoded(
    gradients: Sequence[Tensor],
    format: str,
    *,
    run: int = 128,
    sent: Sequence[Tensor] | None = None,
    reduced: Tensor | None = None,
    factors: Sequence[float] | None = None,
    absent: Sequence[bool] | None = None,
    seed: int | None = None,
    key: int = 0,
    step: int = 0,
) -> Encoded:
    """The mean of one parameter's gradients in a wire format.

    Args:
        gradients: every rank's, of float32, float16 or bfloat16; flat.
        format: a wire format's name.
        run: elements that are encoded together.
        sent: every rank's residual, float32, of what it sends; None: 0.
        reduced: the residual of what is sent back, on the ranks that reduce.
        factors: of every rank's gradient; 0 drops it.
        absent: whether a rank has nothing to send.
        seed: rounds stochastically; None rounds to the nearest.
        key, step: which random numbers. ``key`` also says which rank reduces which runs, and so
            whose numbers round the result.
    """
    ranks, count = len(gradients), gradients[0].numel()
    old = sent or [torch.zeros(count) for _ in gradients]
    back = torch.zeros(count) if reduced is None else reduced
    away = absent or [False] * ranks
    values = [u + r for u, r in zip(_load(gradients, factors or [1.0] * ranks), old, strict=True)]
    result = Encoded(torch.empty_like(gradients[0]), [r.clone() for r in old], back.clone())

    def words(stream: int) -> Tensor | None:
        return None if seed is None else noise(seed, key, step, stream, count)

    own = [words(2 * rank) for rank in range(ranks)]
    owner = _owners(-(-count // run), ranks, key)
    for number, begin in enumerate(range(0, count, run)):
        part = slice(begin, min(begin + run, count))
        n = part.stop - part.start
        records = []
        for rank in range(ranks):
            if away[rank]:
                records.append(absent_run(format, n))
                continue
            mine = own[rank]
            record = encode_run(values[rank][part], format, None if mine is None else mine[part])
            result.sent[rank][part] = values[rank][part] - decode_run(record, format, n)
            records.append(record)
        if all(is_absent(record, format, n) for record in records):
            record = absent_run(format, n)
        else:
            total = tree([decode_run(record, format, n) for record in records])
            value = total * torch.tensor(1 / ranks, dtype=torch.float32) + back[part]
            mine = words(2 * owner[number] + 1)
            record = encode_run(value, format, None if mine is None else mine[part])
            told = decode_run(record, format, n).to(gradients[0].dtype).float()
            result.reduced[part] = value - told
        result.gradient[part] = decode_run(record, format, n).to(gradients[0].dtype)
    return result


def _owners(runs: int, ranks: int, key: int) -> list[int]:
    """Who reduces which run."""
    each, longer = divmod(runs, ranks)
    owners = []
    for turned in range(ranks):
        owners += [(turned - key) % ranks] * (each + (turned < longer))
    return owners


def select(values: Tensor, k: int, threshold: float = 0.0, words: Tensor | None = None) -> Tensor:
    """Which elements a rank sends: indices, ascending. The ``k`` of the largest magnitudes, or of
    the largest random words; of equal ones the first; none of them below ``threshold``."""
    keys = _bits(values.abs()) if words is None else words >> 1
    chosen = keys.sort(descending=True, stable=True).indices[:k].sort().values
    return chosen[~(values[chosen].abs() < threshold)]


def all_reduce_selected(
    gradients: Sequence[Tensor],
    k: int,
    *,
    threshold: float = 0.0,
    words: Tensor | None = None,
    sent: Sequence[Tensor] | None = None,
    factors: Sequence[float] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """The mean of flat gradients of which every rank sends some elements; and new residuals. All is
    NaN where something is not finite on some rank.

    Args:
        gradients, sent, factors: as for :func:`all_reduce_encoded`.
        k, threshold, words: as for :func:`select`.
    """
    old = sent or [torch.zeros(x.numel()) for x in gradients]
    loaded = _load(gradients, factors or [1.0] * len(gradients))
    values = [u + r for u, r in zip(loaded, old, strict=True)]
    given, kept = [], []
    for own in values:
        chosen = select(own, k, threshold, words)
        given.append(torch.zeros_like(own))
        given[-1][chosen] = own[chosen]
        kept.append(own.clone())
        kept[-1][chosen] = 0.0
    total = tree(given) * torch.tensor(1 / len(given), dtype=torch.float32)
    if not all(own.isfinite().all() for own in values):
        total = torch.full_like(total, math.nan)
    return total.to(gradients[0].dtype), kept


UNIT, LANES, NORM_BITS = 1024, 32, 30


def norm(values: Tensor, sections: Sequence[int] | None = None) -> list[tuple[float, float, int]]:
    """What :class:`fastreduce.Norms` counts of a reduced tensor: the L2 norm, the largest
    magnitude, and how many elements are not finite, of each section.

    Squares are added in float64 by lane within units, and units as multiples of one power of two,
    which depends on the largest of them: integers, whose sum knows no order.

    Args:
        values: of a floating dtype, finite or not.
        sections: numbers of elements; None for one of all.
    """
    wide = values.flatten().to(torch.float64)
    found, begin = [], 0
    for count in sections or [len(wide)]:
        part, lead = wide[begin : begin + count], begin % UNIT
        finite = torch.where(torch.isfinite(part), part, 0.0)
        padded = torch.zeros(-(-(lead + count) // UNIT) * UNIT, dtype=torch.float64)
        padded[lead : lead + count] = finite
        rows = padded.square().view(-1, UNIT // LANES, LANES)
        lanes = torch.zeros_like(rows[:, 0])
        for row in rows.unbind(1):
            lanes += row
        while lanes.shape[1] > 1:
            half = lanes.shape[1] // 2
            lanes = lanes[:, :half] + lanes[:, half:]
        largest = part.abs().max().item() if count else 0.0
        nonfinite = int((~torch.isfinite(part)).sum())
        total = largest if nonfinite else _root_of_sum(lanes.flatten().tolist())
        found.append((total, math.nan if part.isnan().any() else largest, nonfinite))
        begin += count
    return found


def _root_of_sum(sums: list[float]) -> float:
    largest = max(sums, default=0.0)
    if largest >= 2.0 ** (NORM_BITS * 30):
        return math.inf
    # The lowest of three neighbouring multiples' units; sums are below half of the highest's range.
    top = max(-28, math.ceil((math.frexp(largest)[1] - NORM_BITS + 1) / NORM_BITS))
    unit = NORM_BITS * (top - 2)
    # Rounds to even. A float times a power of two is exact here.
    parts = sum(round(math.ldexp(each, -unit)) for each in sums)
    return math.sqrt(math.ldexp(float(parts), unit))


def _fma(a: Tensor, b: Tensor | float, c: Tensor) -> Tensor:
    """a b + c of float32, rounded once (but for what float64 rounds before: one in 2^29)."""
    b = b if isinstance(b, Tensor) else torch.tensor(b, dtype=torch.float32)
    return (a.double() * b.double() + c.double()).float()


def _float(value: float) -> float:
    """Rounded to float32."""
    return torch.tensor(value, dtype=torch.float32).item()


def sgd(
    weight: Tensor,
    gradient: Tensor,
    momentum_buffer: Tensor | None,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """A step of torch.optim.SGD in float32: the new weight, and the new buffer if there is
    momentum. ``momentum_buffer`` is None in the first step."""
    if weight_decay:
        gradient = _fma(weight, weight_decay, gradient)
    if momentum:
        if momentum_buffer is None:
            momentum_buffer = gradient
        else:
            kept = momentum_buffer * torch.tensor(momentum, dtype=torch.float32)
            momentum_buffer = _fma(gradient, 1 - dampening, kept)
        gradient = _fma(momentum_buffer, momentum, gradient) if nesterov else momentum_buffer
    return _fma(gradient, -lr, weight), momentum_buffer


def adam(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """A step of torch.optim.Adam or AdamW (``decoupled``) in float32, the ``step``-th from 1 on:
    the new weight and moments. Roots are the nearest float32."""
    beta1, beta2 = betas
    if weight_decay and decoupled:
        weight = weight * torch.tensor(1 - lr * weight_decay, dtype=torch.float32)
    elif weight_decay:
        gradient = _fma(weight, weight_decay, gradient)
    fresh = _float(1 - beta1)
    distance = gradient - exp_avg
    if fresh < 0.5:
        exp_avg = _fma(distance, fresh, exp_avg)
    else:
        exp_avg = _fma(distance, _float(fresh - 1.0), gradient)
    kept = exp_avg_sq * torch.tensor(beta2, dtype=torch.float32)
    scaled = torch.tensor(1 - beta2, dtype=torch.float32) * gradient
    exp_avg_sq = _fma(scaled, gradient, kept)
    root = exp_avg_sq.double().sqrt().float()
    correction = torch.tensor((1 - beta2**step) ** 0.5, dtype=torch.float32)
    scale = root / correction + torch.tensor(eps, dtype=torch.float32)
    rate = torch.tensor(-lr / (1 - beta1**step), dtype=torch.float32)
    return weight + rate * exp_avg / scale, exp_avg, exp_avg_sq
