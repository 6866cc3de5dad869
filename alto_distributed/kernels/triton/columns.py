"""What stands where in the tables that the Triton kernels read; shared by those who write them and the kernels.

Plain numbers, so that this module needs neither torch nor Triton.
"""

from __future__ import annotations

# One row a chunk: the elements that one program of a launch works on. int64.
CHUNK_COLUMNS = 7
(
    SHARD,  # row of the table of shards
    LOW,  # its elements are [LOW, HIGH) of the shard
    HIGH,
    SLOT,  # column of sums and entry of step_sizes
    PLACE,  # column of the table of partial sums
    SEED,  # of the rounding of low-precision states
    SHIFT,  # what makes an element's place in the shard its index in the parameter
) = range(CHUNK_COLUMNS)

# One row a slot: which partial sums are its own. int64.
TOTAL_COLUMNS = 3
FIRST_PLACE, PLACES, TOTAL_SLOT = range(TOTAL_COLUMNS)

# One row a shard. int64; addresses are of element 0.
SHARD_COLUMNS = 7
(
    PARAM,
    GRAD,  # 0 where the shard is not in this step
    EXP_AVG,
    EXP_AVG_SQ,
    GRAD_EMA,  # 0 where there is none
    ALIGNED,  # 1 if all of these are multiples of ALIGNMENT bytes
    COEFFICIENTS,  # row of the table of coefficients
) = range(SHARD_COLUMNS)

ALIGNMENT = 16  # bytes; the widest load or store of a thread

# One row for the shards that share a group and a step. float64; a kernel rounds each to float32 as it reads it.
COEFFICIENT_COLUMNS = 12
(
    ALPHA,
    ONE_MINUS_BETA1,
    BETA2,
    ONE_MINUS_BETA2,
    BETA3,
    ONE_MINUS_BETA3,
    EPS1,
    WEIGHT_DECAY,
    CORRECTION2,  # 1 / (1 - beta2^k)
    CORRECTION3,  # 1 / sqrt(1 - beta3^k)
    STEP,  # k, for the rounding of low-precision states
    SIGN,  # of the gradient: -1 to climb
) = range(COEFFICIENT_COLUMNS)
