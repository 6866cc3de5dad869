/* The two phases of ALTO on the CPU, in plain C. kernel.py calls it, build.py compiles it.

   A step moves every operand through memory once a phase: 48 bytes a parameter with float32 states, and that
   is what it should cost. Phase one therefore is one loop over vectors, in which divisions and square roots
   wait beside the memory rather than after it; states in bfloat16 pass through registers, and weights and gradients in
   bfloat16 through float32 tiles that stay in the first-level cache. All other loops are plain, for the compiler to
   vectorise.

   The results depend neither on the number of threads nor on the width of vectors:
   - each operation on a state is the one that kernels/chunked.py asks torch for, fused where torch fuses
     (fma below) and nowhere else (-ffp-contract=off), so the states of the two agree to the bit;
   - squares are added up in 8 float64 lanes over blocks of fixed size, counted from the start of the span,
     and the blocks of a span are added in order by one thread. A vector of 16 is two turns of the 8 lanes. */

#ifdef __AVX__
#include <immintrin.h>
#endif
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define TILE 512    /* elements that are converted at a time: buffers of 2 KiB */
#define BLOCK 16384 /* elements that a thread takes at a time, and that have a sum of their own */
#define LANES 8     /* of the sums; divides TILE, which divides BLOCK */
#define TAKEN 4     /* blocks that a thread takes at a time */
#define MAX_THREADS 256
#define ROWS 3 /* of the table of sums: |theta|^2, |r|^2, how many elements of the gradient are not 0 */

#ifdef __AVX512F__
#define WIDTH 16 /* elements of a vector; a multiple of LANES */
#define WIDE 8   /* of a vector of float64; divides LANES */
#define PLACES {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#else
#define WIDTH 8
#define WIDE 4
#define PLACES {0, 1, 2, 3, 4, 5, 6, 7}
#endif

/* The numbers of one step, for spans that share them; NUMBERS of kernel.py, field by field. */
typedef struct {
    double rho, beta1, beta2, beta3, eps, scale, weight_decay;
    double gradient_factor; /* sign and unscaling: 1 leaves every bit as it is */
    int64_t step;
} Numbers;

/* One span of a shard; SPAN of kernel.py, field by field. */
typedef struct {
    void *param;
    const void *grad; /* NULL: the span is not in this step */
    void *exp_avg;
    float *exp_avg_sq;
    void *grad_ema; /* NULL where alpha is 0 and always was */
    int64_t numbers; /* which of them */
    int64_t length;
    int64_t index; /* of the first element in its parameter: what the bits of rounding hang on */
    int64_t slot;
    int64_t first_block;
    uint32_t seed;
    int32_t ratio; /* whether the squares of theta and r are wanted */
    int32_t param_is_bf16, grad_is_bf16, exp_avg_is_bf16, grad_ema_is_bf16;
    int32_t rounds_weights; /* whether a bfloat16 param is rounded stochastically; else to nearest */
} Span;

typedef float Vector __attribute__((vector_size(4 * WIDTH)));
typedef float Half __attribute__((vector_size(4 * WIDE)));
typedef double Wide __attribute__((vector_size(8 * WIDE)));
typedef int32_t Counts __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Bits __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));

typedef struct {
    Wide theta[LANES / WIDE], r[LANES / WIDE];
    Counts nonzero; /* elements of the gradient that are not 0; BLOCK at most */
} Sums;

/* The blocks that are one thread's to begin with; next is the first that nobody has taken yet. A cache line each. */
typedef struct {
    int64_t next, end;
    char apart[64 - 2 * sizeof(int64_t)];
} Share;

typedef struct {
    const Span *spans;
    const Numbers *numbers;
    int64_t n_spans, n_blocks;
    double *block_sums;       /* phase one: ROWS a block */
    const double *step_sizes; /* phase two: one a slot */
} Job;

typedef struct {
    const Job *job;
    Share *shares; /* of all threads */
    int number, threads;
} Worker;

int64_t alto_span_size(void) { return (int64_t)sizeof(Span); }

int64_t alto_numbers_size(void) { return (int64_t)sizeof(Numbers); }

int64_t alto_block(void) { return BLOCK; }

/* ---- numbers ------------------------------------------------------------------------------------------- */

static inline float fma_as_torch(float a, float b, float c) {
#if defined(__FP_FAST_FMAF) || defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c; /* a CPU without the instruction: emulating it would be a hundred times slower */
#endif
}

static inline Vector vector_fma(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
    return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int i = 0; i < WIDTH; i++) c[i] = fma_as_torch(a[i], b[i], c[i]);
    return c;
#endif
}

static inline Vector vector_sqrt(Vector x) {
#if defined(__AVX512F__)
    return (Vector)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX__)
    return (Vector)_mm256_sqrt_ps((__m256)x);
#else
    for (int i = 0; i < WIDTH; i++) x[i] = sqrtf(x[i]);
    return x;
#endif
}

static inline Vector all(double x) { return (Vector){0} + (float)x; }

static inline Vector load(const float *from) {
    Vector x;
    memcpy(&x, from, sizeof x);
    return x;
}

/* The same, and asks for what comes 2 KiB later: there are more streams than a CPU follows by itself, and it does not
   follow any into the next page. */
static inline Vector load_ahead(const float *from) {
    __builtin_prefetch(from + 512, 0, 2);
    return load(from);
}

/* Tensors tend to begin at the same place in a page, and a load that follows a store to that place in another page
   waits for it. So a compiler must not move loads behind stores. */
#define LOADS_BEFORE_STORES __asm__ volatile("" ::: "memory")

static inline void store(float *to, Vector x) { memcpy(to, &x, sizeof x); }

static inline Wide widen(const float *from) {
#if defined(__AVX512F__)
    return (Wide)_mm512_cvtps_pd(_mm256_loadu_ps(from)); /* gcc makes many instructions of the other */
#elif defined(__AVX__)
    return (Wide)_mm256_cvtps_pd(_mm_loadu_ps(from));
#else
    Half x;
    memcpy(&x, from, sizeof x);
    return __builtin_convertvector(x, Wide);
#endif
}

/* The square of a float32 is exact in float64, so fused or not gives the same bits. */
static inline Wide plus_square(Wide sum, Wide x) {
#if defined(__AVX512F__)
    return (Wide)_mm512_fmadd_pd((__m512d)x, (__m512d)x, (__m512d)sum);
#elif defined(__FMA__)
    return (Wide)_mm256_fmadd_pd((__m256d)x, (__m256d)x, (__m256d)sum);
#else
    return sum + x * x;
#endif
}

static inline void add_squares(Wide *sums, Vector x) {
    float parts[WIDTH];
    store(parts, x);
    for (int i = 0; i < WIDTH; i += WIDE) {
        Wide *sum = &sums[i % LANES / WIDE];
        *sum = plus_square(*sum, widen(parts + i));
    }
}

/* torch.lerp goes from the nearer end, so that a weight of 1 gives the end itself. */
typedef struct {
    Vector factor;
    int from_start;
} Weight;

static inline Weight weight_of(double w) {
    float narrow = (float)w;
    int from_start = fabsf(narrow) < 0.5f;
    return (Weight){all(from_start ? narrow : narrow - 1.0f), from_start};
}

static inline Vector lerp(Vector start, Vector end, Weight w) {
    return vector_fma(w.factor, end - start, w.from_start ? start : end);
}

static inline float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* To the nearest bfloat16, ties to even; NaN to the quiet NaN of torch. */
static inline uint16_t nearest_bf16(float x) {
    uint32_t bits = to_bits(x);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (uint16_t)rounded;
}

/* The generator of kernels/rounding.py. */
static inline uint32_t mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

/* Of one tensor of a shard at one step: 0 is grad_ema, 1 is exp_avg, 2 is the weights. */
static inline uint32_t key_of(const Span *s, const Numbers *c, uint32_t which) {
    return mix(mix(s->seed + 0x9e3779b9u * (uint32_t)c->step) + which);
}

/* The lower half of infinity is 0, so that nothing is carried; NaN becomes the quiet NaN of torch. */
static inline uint16_t stochastic_bf16(float x, uint32_t noise) {
    uint32_t bits = to_bits(x);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (uint16_t)((bits + (noise & 0xffffu)) >> 16);
}

/* ---- vectors of bfloat16 --------------------------------------------------------------------------------- */

/* A state in bfloat16 passes through registers: it is widened as it is loaded and rounded as it is stored. */
static inline Vector widen_halves(const uint16_t *from) {
    Halves half;
    memcpy(&half, from, sizeof half);
#if defined(__AVX512F__)
    return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)half), 16);
#else
    return (Vector)(__builtin_convertvector(half, Bits) << 16);
#endif
}

/* The bits of rounding of a stretch of elements in one tensor: those of elements whose index has the same upper word
   differ in the lower one, and next is for those behind a multiple of 2^32. */
typedef struct {
    uint32_t low, inner, next;
    int wraps, ahead; /* how many of the elements are before those that are asked for from 0 on */
} Chance;

static inline Chance chance_of(const Span *s, const Numbers *c, uint32_t which, uint64_t index, int n) {
    uint32_t key = key_of(s, c, which), low = (uint32_t)index, high = (uint32_t)(index >> 32);
    return (Chance){low, mix(key + high), mix(key + high + 1), (uint64_t)low + (uint64_t)n > 0x100000000u, 0};
}

static inline Bits bits_of(const Chance *chance, int i) {
    Bits at = (Bits)PLACES + (chance->low + (uint32_t)(chance->ahead + i)), inner = (Bits){0} + chance->inner;
    if (chance->wraps) {
        Bits behind = (Bits)(at < chance->low);
        inner = (inner & ~behind) | (chance->next & behind);
    }
    Bits x = at ^ inner;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

/* stochastic_bf16 of each; returns what was stored. */
static inline Vector round_halves(uint16_t *to, Vector x, const Chance *chance, int i) {
    Bits sum = (Bits)x + (bits_of(chance, i) & 0xffffu);
#if defined(__AVX512F__)
    __mmask16 nan = _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q);
    if (__builtin_expect(nan != 0, 0))
        sum = (Bits)_mm512_mask_mov_epi32((__m512i)sum, nan, _mm512_set1_epi32(0x7fc00000));
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16((__m512i)(sum >> 16)));
#else
    Bits nan = (Bits)(x != x);
    sum = (sum & ~nan) | (0x7fc00000u & nan);
    Halves half = __builtin_convertvector(sum >> 16, Halves);
    memcpy(to, &half, sizeof half);
#endif
    return (Vector)(sum & 0xffff0000u);
}

/* ---- tiles --------------------------------------------------------------------------------------------- */

/* Elements [at, at + n) as float32: where they are, or converted into the buffer. */
static inline float *as_float(const void *source, int is_bf16, int64_t at, int n, float *restrict buffer) {
    if (!is_bf16) return (float *)source + at;
    const uint16_t *restrict half = (const uint16_t *)source + at;
    for (int i = 0; i < n; i++) buffer[i] = from_bits((uint32_t)half[i] << 16);
    return buffer;
}

static void store_nearest(uint16_t *restrict to, const float *restrict from, int n) {
    for (int i = 0; i < n; i++) to[i] = nearest_bf16(from[i]);
}

static void store_stochastic(uint16_t *restrict to, const float *restrict from, int n, uint32_t key, uint64_t index) {
    uint32_t low = (uint32_t)index, high = (uint32_t)(index >> 32);
    if ((uint64_t)low + (uint64_t)n > 0x100000000u) { /* the lower word wraps inside this tile */
        int before = (int)(0x100000000u - low);
        store_stochastic(to, from, before, key, index);
        store_stochastic(to + before, from + before, n - before, key, index + (uint64_t)before);
        return;
    }
    uint32_t inner = mix(key + high);
    for (int i = 0; i < n; i++) to[i] = stochastic_bf16(from[i], mix((low + (uint32_t)i) ^ inner));
}

/* A state: in float32, or in bfloat16 with what rounds it. */
typedef struct {
    float *whole;
    uint16_t *half;
    Chance chance;
} State;

static State state_of(void *tensor, int is_bf16, const Span *s, const Numbers *c, uint32_t which, int64_t at, int n) {
    State state = {0};
    if (!is_bf16) {
        state.whole = tensor ? (float *)tensor + at : NULL;
        return state;
    }
    state.half = (uint16_t *)tensor + at;
    state.chance = chance_of(s, c, which, (uint64_t)(s->index + at), n);
    return state;
}

static inline Vector load_half_ahead(const uint16_t *from) {
    __builtin_prefetch(from + 1024, 0, 2);
    return widen_halves(from);
}

/* Stores a state and returns what is kept of it: phase two will read that, and r is made of it. */
static inline __attribute__((always_inline)) Vector keep(const State *state, int i, Vector x, const int is_half) {
    if (is_half) return round_halves(state->half + i, x, &state->chance, i);
    store(state->whole + i, x);
    return x;
}

/* What phase one does to a vector of elements is told once, and compiled for each combination of its parts:
   - ema: there is a u, and d is not simply g;
   - ratio: the squares of theta and r are wanted;
   - half_u, half_m: which states are in bfloat16.
   n is a multiple of WIDTH. */
static inline __attribute__((always_inline)) void loop(int n, const Numbers *c, const float *restrict g, const State *of_u,
                                                       const State *of_m, float *restrict v, const float *restrict theta,
                                                       Sums *total, const int ema, const int ratio, const int half_u,
                                                       const int half_m) {
    const Weight to_ema = weight_of(c->rho), w1 = weight_of(1 - c->beta1), w2 = weight_of(1 - c->beta2);
    const Vector b3 = all(c->beta3), w3 = all(1 - c->beta3), factor = all(c->gradient_factor);
    const Vector eps = all(c->eps), scale = all(c->scale), decay = all(c->weight_decay);
    const State kept_u = *of_u, kept_m = *of_m, *u = &kept_u, *m = &kept_m; /* in registers, whatever is stored */
    Sums sums = *total;
    for (int i = 0; i < n; i += WIDTH) {
        Vector d = load_ahead(g + i), new_v = load_ahead(v + i), old_u = {0}, here = {0};
        Vector new_m = half_m ? load_half_ahead(m->half + i) : load_ahead(m->whole + i);
        if (ema) old_u = half_u ? load_half_ahead(u->half + i) : load_ahead(u->whole + i);
        if (ratio) here = load_ahead(theta + i);
        LOADS_BEFORE_STORES;
        d *= factor;
        sums.nonzero -= d != 0; /* true is -1; a NaN is not 0 */
        if (ema) {
            Vector gradient = d;
            d = lerp(gradient, old_u, to_ema);
            keep(u, i, lerp(old_u, gradient, w1), half_u);
        }
        new_m = keep(m, i, lerp(new_m, d, w2), half_m);
        new_v = vector_fma(w3 * d, d, new_v * b3);
        store(v + i, new_v);
        if (ratio) { /* r = lambda theta + m^ / (sqrt(v^) + eps1), with both bias corrections in scale and eps */
            add_squares(sums.theta, here);
            add_squares(sums.r, decay * here + (scale * new_m) / (vector_sqrt(new_v) + eps));
        }
    }
    *total = sums;
}

#define LOOP(ema, ratio, half_u, half_m) loop(n, c, g, u, m, v, theta, sums, ema, ratio, half_u, half_m)
#define LOOP_OF_RATIO(ema, half_u, half_m) (theta ? LOOP(ema, 1, half_u, half_m) : LOOP(ema, 0, half_u, half_m))
#define LOOP_OF_M(ema, half_u) (m->half ? LOOP_OF_RATIO(ema, half_u, 1) : LOOP_OF_RATIO(ema, half_u, 0))

static void whole_vectors(int n, const Numbers *c, const float *g, const State *u, const State *m, float *v,
                          const float *theta, Sums *sums) {
    if (u->half)
        LOOP_OF_M(1, 1);
    else if (u->whole)
        LOOP_OF_M(1, 0);
    else
        LOOP_OF_M(0, 0);
}

static void *place_in(const State *state, int i) {
    return state->half ? (void *)(state->half + i) : (void *)(state->whole + i);
}

/* The last, incomplete vector takes a detour through buffers in which the rest are numbers that add nothing. */
static void vectors(int n, const Numbers *c, const float *g, const State *u, const State *m, float *v,
                    const float *theta, Sums *sums) {
    int whole = n - n % WIDTH, has_u = u->half || u->whole;
    whole_vectors(whole, c, g, u, m, v, theta, sums);
    if (whole == n) return;
    size_t rest = sizeof(float) * (size_t)(n - whole), rest_u = u->half ? rest / 2 : rest;
    size_t rest_m = m->half ? rest / 2 : rest;
    float last_g[WIDTH] = {0}, last_u[WIDTH] = {0}, last_m[WIDTH] = {0}, last_theta[WIDTH] = {0}, last_v[WIDTH];
    State buffered_u = *u, buffered_m = *m;
    if (u->whole) buffered_u.whole = last_u;
    if (u->half) buffered_u.half = (uint16_t *)last_u;
    if (m->whole) buffered_m.whole = last_m;
    if (m->half) buffered_m.half = (uint16_t *)last_m;
    buffered_u.chance.ahead = buffered_m.chance.ahead = whole;
    store(last_v, all(1)); /* with eps1 = 0 it is divided by */
    memcpy(last_g, g + whole, rest);
    memcpy(last_v, v + whole, rest);
    memcpy(last_m, place_in(m, whole), rest_m);
    if (has_u) memcpy(last_u, place_in(u, whole), rest_u);
    if (theta) memcpy(last_theta, theta + whole, rest);
    whole_vectors(WIDTH, c, last_g, &buffered_u, &buffered_m, last_v, theta ? last_theta : NULL, sums);
    memcpy(v + whole, last_v, rest);
    memcpy(place_in(m, whole), last_m, rest_m);
    if (has_u) memcpy(place_in(u, whole), last_u, rest_u);
}

static void tile_of_phase_one(const Span *s, const Numbers *c, int64_t at, int n, Sums *sums) {
    float buffer_g[TILE], buffer_theta[TILE];
    const float *g = as_float(s->grad, s->grad_is_bf16, at, n, buffer_g);
    const float *theta = s->ratio ? as_float(s->param, s->param_is_bf16, at, n, buffer_theta) : NULL;
    const State u = state_of(s->grad_ema, s->grad_ema && s->grad_ema_is_bf16, s, c, 0, at, n);
    const State m = state_of(s->exp_avg, s->exp_avg_is_bf16, s, c, 1, at, n);
    vectors(n, c, g, &u, &m, s->exp_avg_sq + at, theta, sums);
}

static inline __attribute__((always_inline)) void loop_of_phase_two(int n, const Numbers *c, double step_size,
                                                                    const void *m, const float *restrict v,
                                                                    float *restrict theta, const int half_m) {
    const float *whole = m;
    const uint16_t *half = m;
    float eps = (float)c->eps, scale = (float)c->scale, decay = (float)c->weight_decay;
    float minus_step = -(float)step_size;
    int i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        Vector here = load(theta + i), moment = half_m ? widen_halves(half + i) : load(whole + i);
        Vector r = all(decay) * here + (all(scale) * moment) / (vector_sqrt(load(v + i)) + all(eps));
        store(theta + i, vector_fma(all(minus_step), r, here));
    }
    for (; i < n; i++) {
        float moment = half_m ? from_bits((uint32_t)half[i] << 16) : whole[i];
        float r = decay * theta[i] + (scale * moment) / (sqrtf(v[i]) + eps);
        theta[i] = fma_as_torch(minus_step, r, theta[i]);
    }
}

static void tile_of_phase_two(const Span *s, const Numbers *c, double step_size, int64_t at, int n) {
    float buffer_theta[TILE];
    float *theta = as_float(s->param, s->param_is_bf16, at, n, buffer_theta);
    if (s->exp_avg_is_bf16)
        loop_of_phase_two(n, c, step_size, (const uint16_t *)s->exp_avg + at, s->exp_avg_sq + at, theta, 1);
    else
        loop_of_phase_two(n, c, step_size, (const float *)s->exp_avg + at, s->exp_avg_sq + at, theta, 0);
    if (!s->param_is_bf16) return;
    if (s->rounds_weights)
        store_stochastic((uint16_t *)s->param + at, theta, n, key_of(s, c, 2), (uint64_t)(s->index + at));
    else
        store_nearest((uint16_t *)s->param + at, theta, n);
}

/* ---- blocks and threads -------------------------------------------------------------------------------- */

static const Span *span_of(const Job *job, int64_t block) {
    int64_t low = 0, high = job->n_spans - 1;
    while (low < high) {
        int64_t middle = low + (high - low + 1) / 2;
        if (job->spans[middle].first_block <= block)
            low = middle;
        else
            high = middle - 1;
    }
    return &job->spans[low];
}

static double sum_of_lanes(const Wide *sums) {
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += sums[lane / WIDE][lane % WIDE];
    return sum;
}

static int converts(const Span *s) {
    return s->grad_is_bf16 || s->param_is_bf16;
}

static void do_block(const Job *job, int64_t block) {
    const Span *s = span_of(job, block);
    int64_t at = (block - s->first_block) * BLOCK;
    int64_t stop = at + BLOCK < s->length ? at + BLOCK : s->length;
    const Numbers *c = &job->numbers[s->numbers];
    Sums sums;
    memset(&sums, 0, sizeof sums);
    if (!s->grad || (job->step_sizes && job->step_sizes[s->slot] == 0)) stop = at;
    int length = converts(s) ? TILE : BLOCK; /* each end of a loop is a pause in the stream from memory */
    for (; at < stop; at += length) {
        int n = stop - at < length ? (int)(stop - at) : length;
        if (job->block_sums)
            tile_of_phase_one(s, c, at, n, &sums);
        else
            tile_of_phase_two(s, c, job->step_sizes[s->slot], at, n);
    }
    if (job->block_sums) {
        double *here = job->block_sums + ROWS * block;
        here[0] = sum_of_lanes(sums.theta);
        here[1] = sum_of_lanes(sums.r);
        here[2] = 0;
        for (int i = 0; i < WIDTH; i++) here[2] += sums.nonzero[i];
    }
}

/* A thread works through its own share, in order, and then helps with those of the others: memory is fastest when each
   thread reads one long stretch, and a thread that the machine holds up must not be waited for. */
static void *work(void *argument) {
    Worker *worker = argument;
    for (int turn = 0; turn < worker->threads; turn++) {
        Share *share = &worker->shares[(worker->number + turn) % worker->threads];
        int64_t block;
        while ((block = __atomic_fetch_add(&share->next, TAKEN, __ATOMIC_RELAXED)) < share->end) {
            int64_t stop = block + TAKEN < share->end ? block + TAKEN : share->end;
            for (; block < stop; block++) do_block(worker->job, block);
        }
    }
    return NULL;
}

/* Threads live for one phase: nothing is left that a fork could lose, and starting them takes microseconds.
   One that cannot be started leaves its share to the others. */
static void run(const Job *job, int64_t wanted) {
    pthread_t others[MAX_THREADS];
    Worker workers[MAX_THREADS];
    Share shares[MAX_THREADS];
    int threads = wanted > MAX_THREADS ? MAX_THREADS : (int)wanted, started = 1;
    if (threads > job->n_blocks) threads = (int)job->n_blocks;
    if (threads < 1) threads = 1;
    for (int i = 0; i < threads; i++) {
        shares[i].next = job->n_blocks * i / threads;
        shares[i].end = job->n_blocks * (i + 1) / threads;
        workers[i] = (Worker){job, shares, i, threads};
    }
    while (started < threads && pthread_create(&others[started], NULL, work, &workers[started]) == 0) started++;
    work(&workers[0]);
    for (int i = 1; i < started; i++) pthread_join(others[i], NULL);
}

/* sums has ROWS rows of an entry a slot. Returns 0, or -1 if there was no memory for the blocks' sums. */
int alto_phase_one(const Span *spans, const Numbers *numbers, int64_t n_spans, int64_t n_blocks, int64_t threads,
                   double *sums, int64_t slots) {
    if (n_blocks == 0) return 0;
    Job job = {spans, numbers, n_spans, n_blocks, malloc(sizeof(double) * ROWS * (size_t)n_blocks), NULL};
    if (!job.block_sums) return -1;
    run(&job, threads);
    for (int64_t i = 0; i < n_spans; i++) {
        int64_t end = i + 1 < n_spans ? spans[i + 1].first_block : n_blocks;
        double total[ROWS] = {0};
        for (int64_t block = spans[i].first_block; block < end; block++)
            for (int row = 0; row < ROWS; row++) total[row] += job.block_sums[ROWS * block + row];
        for (int row = 0; row < ROWS; row++) sums[row * slots + spans[i].slot] += total[row];
    }
    free(job.block_sums);
    return 0;
}

void alto_phase_two(const Span *spans, const Numbers *numbers, int64_t n_spans, int64_t n_blocks, int64_t threads,
                    const double *step_sizes) {
    Job job = {spans, numbers, n_spans, n_blocks, NULL, step_sizes};
    if (n_blocks > 0) run(&job, threads);
}
