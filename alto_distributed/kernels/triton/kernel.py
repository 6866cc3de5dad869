# mypy: ignore-errors
# ruff: noqa: SIM300
# To a type checker the bodies below are not Python: Triton compiles them, and knows its own types. To the linter a
# name in capitals is a constant that belongs on the right; here it is a parameter known when the kernel is compiled.
"""The Triton kernels: one launch of each phase serves all shards that are alike in their dtypes.

A program takes one chunk: neighboring elements of one span. It goes over them tile by tile; tiles that
lie wholly inside the chunk, in shards whose tensors are all aligned, with the widest loads and stores
there are, the others element by element under a mask. Which shard, which elements and which slot it reads
from tables (``columns``); addresses are numbers in a table, so one launch reaches any number of
tensors. All that changes from step to step is read from memory too: nothing is compiled anew, and a graph
that replays the launches sees the new values.

Sums are the same to the bit from run to run, and rest on no order between programs. A program leaves its partial
sums, float64, in a place of its own. A second, tiny launch (:func:`finish`) adds up the places of each slot in their
order. There is no atomic operation and no fence.

A shard that is not in a step has no gradient address. Its programs find nothing to do. So tables serve steps in which
some gradients are missing, as those of experts without tokens.

No ``from __future__ import annotations`` here: Triton reads the annotations.
"""

import triton
import triton.language as tl

from . import columns
from .elements import FOR_EXP_AVG, FOR_GRAD_EMA, from_bits, load, rounding_key, store, to_either_side, to_nearest

_SHARD = tl.constexpr(columns.SHARD)
_LOW = tl.constexpr(columns.LOW)
_HIGH = tl.constexpr(columns.HIGH)
_SLOT = tl.constexpr(columns.SLOT)
_PLACE = tl.constexpr(columns.PLACE)
_SEED = tl.constexpr(columns.SEED)
_SHIFT = tl.constexpr(columns.SHIFT)
_CHUNK_COLUMNS = tl.constexpr(columns.CHUNK_COLUMNS)

_FIRST_PLACE = tl.constexpr(columns.FIRST_PLACE)
_PLACES = tl.constexpr(columns.PLACES)
_TOTAL_SLOT = tl.constexpr(columns.TOTAL_SLOT)
_TOTAL_COLUMNS = tl.constexpr(columns.TOTAL_COLUMNS)

_PARAM = tl.constexpr(columns.PARAM)
_GRAD = tl.constexpr(columns.GRAD)
_EXP_AVG = tl.constexpr(columns.EXP_AVG)
_EXP_AVG_SQ = tl.constexpr(columns.EXP_AVG_SQ)
_GRAD_EMA = tl.constexpr(columns.GRAD_EMA)
_ALIGNED = tl.constexpr(columns.ALIGNED)
_COEFFICIENTS = tl.constexpr(columns.COEFFICIENTS)
_SHARD_COLUMNS = tl.constexpr(columns.SHARD_COLUMNS)

_ALPHA = tl.constexpr(columns.ALPHA)
_ONE_MINUS_BETA1 = tl.constexpr(columns.ONE_MINUS_BETA1)
_BETA2 = tl.constexpr(columns.BETA2)
_ONE_MINUS_BETA2 = tl.constexpr(columns.ONE_MINUS_BETA2)
_BETA3 = tl.constexpr(columns.BETA3)
_ONE_MINUS_BETA3 = tl.constexpr(columns.ONE_MINUS_BETA3)
_EPS1 = tl.constexpr(columns.EPS1)
_WEIGHT_DECAY = tl.constexpr(columns.WEIGHT_DECAY)
_CORRECTION2 = tl.constexpr(columns.CORRECTION2)
_CORRECTION3 = tl.constexpr(columns.CORRECTION3)
_STEP = tl.constexpr(columns.STEP)
_SIGN = tl.constexpr(columns.SIGN)
_COEFFICIENT_COLUMNS = tl.constexpr(columns.COEFFICIENT_COLUMNS)


# -- the update -------------------------------------------------------------------------------------------


@triton.jit
def _of_direction(row):
    """The numbers that r needs. All of a row is read once a program: stores could change it, for all the compiler
    knows, so in a loop it would be read again for every tile."""
    return (
        tl.load(row + _CORRECTION2).to(tl.float32),
        tl.load(row + _CORRECTION3).to(tl.float32),
        tl.load(row + _EPS1).to(tl.float32),
        tl.load(row + _WEIGHT_DECAY).to(tl.float32),
    )


@triton.jit
def _of_moments(row, inverse_scale):
    """The numbers that the states need."""
    return (
        tl.load(row + _ALPHA).to(tl.float32),
        tl.load(row + _ONE_MINUS_BETA1).to(tl.float32),
        tl.load(row + _BETA2).to(tl.float32),
        tl.load(row + _ONE_MINUS_BETA2).to(tl.float32),
        tl.load(row + _BETA3).to(tl.float32),
        tl.load(row + _ONE_MINUS_BETA3).to(tl.float32),
        tl.load(row + _SIGN).to(tl.float32) * tl.load(inverse_scale),
    )


@triton.jit
def _direction(theta, m, v, numbers):
    """r = m^ / (sqrt(v^) + eps1) + lambda theta, with the corrections as factors."""
    correction2, correction3, eps1, weight_decay = numbers
    return tl.div_rn(m, tl.sqrt_rn(v) * correction3 + eps1) * correction2 + weight_decay * theta


@triton.jit
def _tile_of_phase_one(
    tile,
    chunk,
    addresses,
    rounding,
    of_moments,
    of_direction,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    EXP_AVG: tl.constexpr,
    GRAD_EMA: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Updates the states of a tile; gives theta and r of it as float64, and whether g is not 0, with zeros outside of
    the chunk."""
    tile = tl.cast(tile, tl.int64)  # a loop of the interpreter counts in plain numbers
    low, high = chunk
    param, grad, exp_avg, exp_avg_sq, grad_ema = addresses
    key_of_grad_ema, key_of_exp_avg, shift = rounding
    alpha, one_minus_beta1, beta2, one_minus_beta2, beta3, one_minus_beta3, gradient_factor = of_moments
    index = tile * TILE + tl.arange(0, TILE)
    inside = (index >= low) & (index < high)
    first = tile * TILE + shift  # index in the parameter
    d = load(grad, tile, inside, GRAD, TILE, WIDE) * gradient_factor
    nonzero = (d != 0.0).to(tl.int32)  # a NaN is not 0 either
    m = load(exp_avg, tile, inside, EXP_AVG, TILE, WIDE)
    v = load(exp_avg_sq, tile, inside, tl.float32, TILE, WIDE)
    theta = load(param, tile, inside, PARAM, TILE, WIDE)

    if GRAD_EMA is not None:
        u = load(grad_ema, tile, inside, GRAD_EMA, TILE, WIDE)
        a = one_minus_beta1 * (d - u)
        d += alpha * a
        u += a
        if GRAD_EMA == tl.bfloat16:
            store(grad_ema, tile, inside, to_either_side(u, key_of_grad_ema, first, TILE), GRAD_EMA, TILE, WIDE)
        else:
            store(grad_ema, tile, inside, u, GRAD_EMA, TILE, WIDE)

    m = beta2 * m + one_minus_beta2 * d
    if EXP_AVG == tl.bfloat16:
        rounded = to_either_side(m, key_of_exp_avg, first, TILE)
        store(exp_avg, tile, inside, rounded, EXP_AVG, TILE, WIDE)
        # r is that of phase two, which will find the rounded one.
        m = from_bits(rounded)
    else:
        store(exp_avg, tile, inside, m, EXP_AVG, TILE, WIDE)
    v = beta3 * v + one_minus_beta3 * (d * d)
    store(exp_avg_sq, tile, inside, v, tl.float32, TILE, WIDE)

    r = _direction(theta, m, v, of_direction)
    if not WIDE:
        r = tl.where(inside, r, 0.0)  # 0/0 where eps1 is 0
    return theta.to(tl.float64), r.to(tl.float64), nonzero


@triton.jit
def _tile_of_phase_two(
    tile,
    chunk,
    addresses,
    of_direction,
    step_size,
    PARAM: tl.constexpr,
    EXP_AVG: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    tile = tl.cast(tile, tl.int64)  # a loop of the interpreter counts in plain numbers
    low, high = chunk
    param, exp_avg, exp_avg_sq = addresses
    index = tile * TILE + tl.arange(0, TILE)
    inside = (index >= low) & (index < high)
    theta = load(param, tile, inside, PARAM, TILE, WIDE)
    m = load(exp_avg, tile, inside, EXP_AVG, TILE, WIDE)
    v = load(exp_avg_sq, tile, inside, tl.float32, TILE, WIDE)
    theta -= step_size * _direction(theta, m, v, of_direction)
    store(param, tile, inside, to_nearest(theta, PARAM), PARAM, TILE, WIDE)


@triton.jit
def _tiles(shard, low, high, TILE: tl.constexpr):
    """Of elements [low, high): their tiles [first, stop), and among them those to be taken whole, [begin, end)."""
    first = low // TILE
    stop = tl.where(high > low, (high + (TILE - 1)) // TILE, first)
    aligned = tl.load(shard + _ALIGNED) != 0
    begin = tl.where(aligned & (high > low), (low + (TILE - 1)) // TILE, stop)
    end = tl.maximum(high // TILE, begin)
    return first, begin, end, stop


# -- the launches -----------------------------------------------------------------------------------------


@triton.jit
def _elements(chunk, shard):
    """[low, high) of a chunk; nothing of a shard that is not in this step."""
    low, high = tl.load(chunk + _LOW), tl.load(chunk + _HIGH)
    return low, tl.where(tl.load(shard + _GRAD) != 0, high, low)


@triton.jit(do_not_specialize=["places"])
def phase_one(
    chunks,
    partials,
    places,
    shards,
    coefficients,
    inverse_scale,
    skip,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    EXP_AVG: tl.constexpr,
    GRAD_EMA: tl.constexpr,
    TILE: tl.constexpr,
):
    if skip is not None:  # noqa: SIM102 - settled when it is compiled, the other as it runs
        if tl.load(skip) != 0:
            return
    chunk = chunks + tl.program_id(0).to(tl.int64) * _CHUNK_COLUMNS
    shard = shards + tl.load(chunk + _SHARD) * _SHARD_COLUMNS
    row = coefficients + tl.load(shard + _COEFFICIENTS) * _COEFFICIENT_COLUMNS
    low, high = _elements(chunk, shard)
    first, begin, end, stop = _tiles(shard, low, high, TILE)

    addresses = (
        tl.load(shard + _PARAM),
        tl.load(shard + _GRAD),
        tl.load(shard + _EXP_AVG),
        tl.load(shard + _EXP_AVG_SQ),
        tl.load(shard + _GRAD_EMA),
    )
    seed, step = tl.load(chunk + _SEED), tl.load(row + _STEP).to(tl.int64)
    rounding = (
        rounding_key(seed, step, FOR_GRAD_EMA),
        rounding_key(seed, step, FOR_EXP_AVG),
        tl.load(chunk + _SHIFT),
    )
    moments, direction = _of_moments(row, inverse_scale), _of_direction(row)

    theta_squares = tl.zeros([TILE], tl.float64)
    r_squares = tl.zeros([TILE], tl.float64)
    nonzeros = tl.zeros([TILE], tl.int32)
    # Tiles come in their order whichever way they go, so that the sums do not hang on alignment.
    for tile in range(first, begin):
        theta, r, nonzero = _tile_of_phase_one(
            tile, (low, high), addresses, rounding, moments, direction, PARAM, GRAD, EXP_AVG, GRAD_EMA, TILE, False
        )
        theta_squares += theta * theta
        r_squares += r * r
        nonzeros += nonzero
    for tile in range(begin, end):
        theta, r, nonzero = _tile_of_phase_one(
            tile, (low, high), addresses, rounding, moments, direction, PARAM, GRAD, EXP_AVG, GRAD_EMA, TILE, True
        )
        theta_squares += theta * theta
        r_squares += r * r
        nonzeros += nonzero
    for tile in range(end, stop):
        theta, r, nonzero = _tile_of_phase_one(
            tile, (low, high), addresses, rounding, moments, direction, PARAM, GRAD, EXP_AVG, GRAD_EMA, TILE, False
        )
        theta_squares += theta * theta
        r_squares += r * r
        nonzeros += nonzero

    place = partials + tl.load(chunk + _PLACE)
    tl.store(place, tl.sum(theta_squares))
    tl.store(place + places, tl.sum(r_squares))
    tl.store(place + 2 * places, tl.sum(nonzeros).to(tl.float64))


@triton.jit(do_not_specialize=["places", "slots"])
def finish(totals, partials, places, sums, slots, skip, TILE: tl.constexpr):
    """Adds a slot's partial sums to ``sums``, one row of both tables a program of the second dimension."""
    if skip is not None:  # noqa: SIM102 - see above
        if tl.load(skip) != 0:
            return
    total = totals + tl.program_id(0).to(tl.int64) * _TOTAL_COLUMNS
    row = tl.program_id(1).to(tl.int64)
    first = partials + row * places + tl.load(total + _FIRST_PLACE)
    count = tl.load(total + _PLACES)
    found = tl.zeros([TILE], tl.float64)
    for start in range(0, count, TILE):
        place = start + tl.arange(0, TILE)
        found += tl.load(first + place, mask=place < count, other=0.0)
    slot = sums + row * slots + tl.load(total + _TOTAL_SLOT)
    tl.store(slot, tl.load(slot) + tl.sum(found))


@triton.jit
def phase_two(
    chunks,
    shards,
    coefficients,
    step_sizes,
    skip,
    PARAM: tl.constexpr,
    EXP_AVG: tl.constexpr,
    TILE: tl.constexpr,
):
    if skip is not None:  # noqa: SIM102 - see above
        if tl.load(skip) != 0:
            return
    chunk = chunks + tl.program_id(0).to(tl.int64) * _CHUNK_COLUMNS
    shard = shards + tl.load(chunk + _SHARD) * _SHARD_COLUMNS
    row = coefficients + tl.load(shard + _COEFFICIENTS) * _COEFFICIENT_COLUMNS
    step_size = tl.load(step_sizes + tl.load(chunk + _SLOT)).to(tl.float32)
    low, high = _elements(chunk, shard)
    high = tl.where(step_size != 0.0, high, low)  # 0 is "stay"
    first, begin, end, stop = _tiles(shard, low, high, TILE)

    addresses = (tl.load(shard + _PARAM), tl.load(shard + _EXP_AVG), tl.load(shard + _EXP_AVG_SQ))
    direction = _of_direction(row)

    for tile in range(first, begin):
        _tile_of_phase_two(tile, (low, high), addresses, direction, step_size, PARAM, EXP_AVG, TILE, False)
    for tile in range(begin, end):
        _tile_of_phase_two(tile, (low, high), addresses, direction, step_size, PARAM, EXP_AVG, TILE, True)
    for tile in range(end, stop):
        _tile_of_phase_two(tile, (low, high), addresses, direction, step_size, PARAM, EXP_AVG, TILE, False)
