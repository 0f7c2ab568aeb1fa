// One decode step's work between the matrix products, on a CPU in float32: norms, rotation, attention over the cache, SiLU, the draw.
// Torch does each as a handful of small operations over the same few kilobytes; here each is one call. No torch headers, so that
// it compiles in about a second; built and called by cpu_kernels.py.
//
// N rows, V vocabulary, H query heads, K key heads, r = H / K, D head width, E hidden width, I width of the MLP.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

namespace {

// exp(x) for x <= 0, to about 1e-7: 2^n by the exponent's bits, times a polynomial on [-ln 2 / 2, ln 2 / 2] (the Taylor terms up to
// x^6 / 720, whose rest is below 2e-7). Not libm's, which does not vectorise without changing what NaN means everywhere.
inline float exp_fast(float x) {
    if (!(x > -87.0f)) x = std::isnan(x) ? x : -87.0f;
    float n = std::nearbyintf(x * 1.44269504088896341f);
    float y = x - n * 0.693359375f - n * -2.12194440e-4f;
    float p = 1.0f + y * (1.0f + y * (0.5f + y * (1.66666667e-1f + y * (4.16666667e-2f + y * (8.33333333e-3f + y * 1.38888889e-3f)))));
    int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

// Torch's own threads wait for work by spinning, so that a new one may have to wait for a core, a millisecond or so: below some
// milliseconds of work for each thread, one does it all.
template <class F> void over_rows(int64_t rows, int64_t work_a_row, int threads, F body) {
    int64_t wanted = std::min<int64_t>({threads, rows, 1 + rows * work_a_row / 20000000});
    if (wanted <= 1) return body(0, rows);
    std::vector<std::thread> pool;
    int64_t t = 1;
    try {
        for (; t < wanted; t++) pool.emplace_back(body, rows * t / wanted, rows * (t + 1) / wanted);
    } catch (const std::exception&) {  // no further thread: a container limits their number
    }
    body(rows * t / wanted, rows);
    body(0, rows / wanted);
    for (auto& thread : pool) thread.join();
}

// tanh(x): its Taylor series near zero, where 1 - e would lose digits.
inline float tanh_fast(float x) {
    const float e = exp_fast(-2.0f * std::fabs(x)), far = (1.0f - e) / (1.0f + e), y = x * x;
    const float near = x * (1.0f + y * (-3.33333333e-1f + y * (1.33333333e-1f + y * (-5.39682540e-2f + y * 2.18694885e-2f))));
    return std::fabs(x) < 0.25f ? near : std::copysign(far, x);
}

inline float largest_of(const float* x, int64_t n) {
    float lane[16], found = -INFINITY;  // lanes of their own: one chain of comparisons would wait for itself
    std::fill(lane, lane + 16, -INFINITY);
    int64_t j = 0;
    for (; j + 16 <= n; j += 16)
        for (int i = 0; i < 16; i++) lane[i] = x[j + i] > lane[i] ? x[j + i] : lane[i];
    for (; j < n; j++) found = x[j] > found ? x[j] : found;
    for (int i = 0; i < 16; i++) found = lane[i] > found ? lane[i] : found;
    return found;
}

// exp(x), and 0 where it is below 1e-38: what has no weight is not to be drawn.
inline float weight_of(float x) { return x <= -87.0f ? 0.0f : exp_fast(x); }

constexpr int64_t SEARCHED = 512;  // tokens that share a sum: the block is found first, then the token in it

// The first of n whose sum is above the target, which is kept below the last sum; its own weight is not zero.
inline int64_t first_above(const double* sums, int64_t n, double target) {
    const double below = std::min(target, std::nextafter(sums[n - 1], 0.0));
    int64_t i = 0;
    while (i < n - 1 && !(sums[i] > below)) i++;
    return i;
}

struct Draw {
    const float* logits;  // [N, V]
    const float* temperature;  // [N] or null: 1 everywhere
    const bool* greedy;  // [N] or null: nowhere
    const double* uniform;  // [N] in [0, 1)
    int64_t vocab;
    int64_t* token;  // [N]
    float* logprob;  // [N]

    void rows(int64_t first, int64_t last) const {
        const int64_t blocks = (vocab + SEARCHED - 1) / SEARCHED;
        std::vector<float> weight(vocab), scaled(temperature ? vocab : 0);
        std::vector<double> sums(blocks), inside(SEARCHED);
        for (int64_t n = first; n < last; n++) {
            const float* x = logits + n * vocab;
            if (temperature) {
                for (int64_t v = 0; v < vocab; v++) scaled[v] = x[v] / temperature[n];
                x = scaled.data();
            }
            const float largest = largest_of(x, vocab);
            double total = 0.0;
            for (int64_t b = 0; b < blocks; b++) {
                const int64_t start = b * SEARCHED, end = std::min(vocab, start + SEARCHED);
                for (int64_t v = start; v < end; v++) weight[v] = weight_of(x[v] - largest);
                double sum = 0.0;
                for (int64_t v = start; v < end; v++) sum += weight[v];
                sums[b] = total += sum;
            }
            if (greedy && greedy[n]) {
                token[n] = std::max<int64_t>(0, std::find(x, x + vocab, largest) - x);
                if (token[n] == vocab) token[n] = 0;  // nothing but NaN
            } else {
                const double target = uniform[n] * total;
                const int64_t block = first_above(sums.data(), blocks, target), start = block * SEARCHED;
                const int64_t width = std::min(SEARCHED, vocab - start);
                double sum = 0.0;
                for (int64_t v = 0; v < width; v++) inside[v] = sum += weight[start + v];
                token[n] = start + first_above(inside.data(), width, target - (block ? sums[block - 1] : 0.0));
            }
            logprob[n] = x[token[n]] - largest - static_cast<float>(std::log(total));
        }
    }
};

struct Block {  // keys (or values) [slots, K, positions, D]: positions lie one after the other
    float* start;
    int64_t slot, head;
    float* at(int64_t s, int64_t h) const { return start + s * slot + h * head; }
};

struct Step {
    const float* qkv;  // [N, (H + 2 K) D]
    const float* norm_q;  // [D] or null: no norms
    const float* norm_k;
    float eps;
    const float* cos;  // [positions, D]
    const float* sin;  // [positions, D], the first half negated
    const int64_t* position;  // [N]
    Block prompt_k, prompt_v;
    const int64_t* prompt_of_row;  // [N]
    const int64_t* prompt_length;  // [prompts]
    Block row_k, row_v;
    const int64_t* slot;  // [N] the row's slot in `row_k` and `row_v`, ascending; several tokens of a slot follow each other
    const int64_t* written;  // [N] positions of the row's own response that are filled
    int64_t heads, key_heads, width;
    int64_t window;  // positions that a query attends to, its own included; 0: all
    float softcap;  // scores s become softcap tanh(s / softcap); 0: they stay
    float* out;  // [N, H D]
};

template <int WIDTH> struct Head {
    // WIDTH 0: any width, known at run time
    static inline int64_t width(int64_t d) { return WIDTH ? WIDTH : d; }

    static inline void norm_rotate(const float* __restrict x, const float* __restrict weight, float eps, const float* __restrict cos,
                                   const float* __restrict sin, float scale, int64_t d, float* __restrict normed,
                                   float* __restrict to) {
        const int64_t D = width(d), half = D / 2;
        float inv = 1.0f;
        if (weight) {
            float sum = 0.0f;
            for (int64_t i = 0; i < D; i++) sum += x[i] * x[i];
            inv = 1.0f / std::sqrt(sum / D + eps);
        }
        if (weight)
            for (int64_t i = 0; i < D; i++) normed[i] = x[i] * inv * weight[i];
        else
            std::memcpy(normed, x, D * sizeof(float));
        for (int64_t i = 0; i < half; i++) {
            to[i] = (normed[i] * cos[i] + normed[i + half] * sin[i]) * scale;
            to[i + half] = (normed[i + half] * cos[i + half] + normed[i] * sin[i + half]) * scale;
        }
    }

    // R query heads at once over n keys: `to` [R, stride]; each head's largest score goes into `largest`. While they are worked out, what
    // lies at `next` (a key a position, until `ahead`) comes nearer: blocks are short, so that the processor's own guess comes late.
    template <int R>
    static inline void scores(const float* q, const float* keys, int64_t n, int64_t d, float* to, int64_t stride, float* largest,
                              const float* next, int64_t ahead) {
        const int64_t D = width(d);
        for (int64_t j = 0; j < n; j++) {
            const float* k = keys + j * D;
            if (j < ahead)
                for (int64_t i = 0; i < D; i += 16) __builtin_prefetch(next + j * D + i, 0, 2);
            float sum[R] = {};
            for (int64_t i = 0; i < D; i++)
                for (int c = 0; c < R; c++) sum[c] += q[c * D + i] * k[i];
            for (int c = 0; c < R; c++) to[c * stride + j] = sum[c];
        }
        for (int c = 0; c < R; c++) largest[c] = std::max(largest[c], largest_of(to + c * stride, n));
    }

    // to [R, D] += p [R, stride] times n values.
    template <int R>
    static inline void add_values(const float* p, int64_t stride, const float* values, int64_t n, int64_t d, float* to, const float* next,
                                  int64_t ahead) {
        const int64_t D = width(d);
        if constexpr (WIDTH > 0) {
            float sum[R][WIDTH > 0 ? WIDTH : 1];  // in registers
            for (int c = 0; c < R; c++)
                for (int i = 0; i < WIDTH; i++) sum[c][i] = to[c * WIDTH + i];
            for (int64_t j = 0; j < n; j++) {
                if (j < ahead)
                    for (int i = 0; i < WIDTH; i += 16) __builtin_prefetch(next + j * WIDTH + i, 0, 2);
                for (int c = 0; c < R; c++)
                    for (int i = 0; i < WIDTH; i++) sum[c][i] += p[c * stride + j] * values[j * WIDTH + i];
            }
            for (int c = 0; c < R; c++)
                for (int i = 0; i < WIDTH; i++) to[c * WIDTH + i] = sum[c][i];
        } else {
            for (int64_t j = 0; j < n; j++)
                for (int c = 0; c < R; c++)
                    for (int64_t i = 0; i < D; i++) to[c * D + i] += p[c * stride + j] * values[j * D + i];
        }
    }

    // Where a row's keys and values of one key head lie: `before` positions of its prompt, then `own` of its response, both without
    // those that its window leaves out.
    struct Seen {
        float *prompt_k, *prompt_v, *row_k, *row_v;
        int64_t before, own;
        Seen(const Step& s, int64_t n, int64_t h)
            : prompt_k(s.prompt_k.at(s.prompt_of_row[n], h)), prompt_v(s.prompt_v.at(s.prompt_of_row[n], h)),
              row_k(s.row_k.at(s.slot[n], h)), row_v(s.row_v.at(s.slot[n], h)), before(s.prompt_length[s.prompt_of_row[n]]),
              own(s.written[n]) {
            if (!s.window || before + own < s.window) return;
            const int64_t skipped = before + own + 1 - s.window, of_prompt = std::min(skipped, before), of_row = skipped - of_prompt;
            prompt_k += of_prompt * width(s.width), prompt_v += of_prompt * width(s.width), before -= of_prompt;
            row_k += of_row * width(s.width), row_v += of_row * width(s.width), own -= of_row;
        }
    };

    // Query heads g to g + R of row n, whose last key is written already. `q` [R, D] and `p` [R, positions] are for what comes between.
    template <int R>
    static inline void heads(const Step& s, int64_t n, int64_t g, const Seen& at, const Seen& next, float* normed, float* q, float* p) {
        const int64_t D = width(s.width), all = at.before + at.own + 1;
        const float *x = s.qkv + (n * (s.heads + 2 * s.key_heads) + g) * D, scale = 1.0f / std::sqrt(static_cast<float>(D));
        const float *cos = s.cos + s.position[n] * D, *sin = s.sin + s.position[n] * D;
        float* to = s.out + (n * s.heads + g) * D;
        float largest[R];
        for (int c = 0; c < R; c++) {
            norm_rotate(x + c * D, s.norm_q, s.eps, cos, sin, scale, D, normed, q + c * D);
            largest[c] = -INFINITY;
        }
        scores<R>(q, at.prompt_k, at.before, D, p, all, largest, next.prompt_k, next.before);
        scores<R>(q, at.row_k, at.own + 1, D, p + at.before, all, largest, next.row_k, next.own);
        if (s.softcap > 0.0f)
            for (int c = 0; c < R; c++) {
                for (int64_t j = 0; j < all; j++) p[c * all + j] = s.softcap * tanh_fast(p[c * all + j] / s.softcap);
                largest[c] = largest_of(p + c * all, all);
            }
        float total[R];
        for (int c = 0; c < R; c++) {
            float *one = p + c * all, sum = 0.0f;
            for (int64_t j = 0; j < all; j++) one[j] = exp_fast(one[j] - largest[c]);
            for (int64_t j = 0; j < all; j++) sum += one[j];
            total[c] = sum;
        }
        std::fill(to, to + R * D, 0.0f);
        add_values<R>(p, all, at.prompt_v, at.before, D, to, next.prompt_v, next.before);
        add_values<R>(p + at.before, all, at.row_v, at.own + 1, D, to, next.row_v, next.own);
        for (int c = 0; c < R; c++) {
            const float inv = 1.0f / total[c];
            for (int64_t i = 0; i < D; i++) to[c * D + i] *= inv;
        }
    }

    static void rows(const Step& s, int64_t first, int64_t last) {
        const int64_t D = width(s.width), r = s.heads / s.key_heads;
        std::vector<float> scratch(5 * D), p;
        float *normed = scratch.data(), *q = normed + D;
        for (int64_t n = first; n < last; n++) {
            const float* x = s.qkv + n * (s.heads + 2 * s.key_heads) * D;
            const float *cos = s.cos + s.position[n] * D, *sin = s.sin + s.position[n] * D;
            for (int64_t h = 0; h < s.key_heads; h++) {
                const Seen at(s, n, h);
                const bool same = h + 1 < s.key_heads;
                Seen next(s, same ? n : std::min(n + 1, last - 1), same ? h + 1 : 0);
                p.resize(4 * (at.before + at.own + 1));
                norm_rotate(x + (s.heads + h) * D, s.norm_k, s.eps, cos, sin, 1.0f, D, normed, at.row_k + at.own * D);
                std::memcpy(at.row_v + at.own * D, x + (s.heads + s.key_heads + h) * D, D * sizeof(float));
                int64_t g = h * r;
                const int64_t end = g + r;
                for (; g + 4 <= end; g += 4) heads<4>(s, n, g, at, next, normed, q, p.data());
                for (; g + 2 <= end; g += 2) heads<2>(s, n, g, at, next, normed, q, p.data());
                for (; g < end; g++) heads<1>(s, n, g, at, next, normed, q, p.data());
            }
        }
    }
};

}  // namespace

extern "C" {

// y = x / sqrt(mean(x^2) + eps) * w, [N, E]
void rms_norm(const float* x, const float* weight, float eps, int64_t rows, int64_t width, float* y) {
    for (int64_t n = 0; n < rows; n++, x += width, y += width) {
        float sum = 0.0f;
        for (int64_t i = 0; i < width; i++) sum += x[i] * x[i];
        const float inv = 1.0f / std::sqrt(sum / width + eps);
        for (int64_t i = 0; i < width; i++) y[i] = x[i] * inv * weight[i];
    }
}

// y = silu(gate) * up, from [N, 2 I] (gate, then up) to [N, I]
void silu_mul(const float* x, int64_t rows, int64_t width, int threads, float* y) {
    over_rows(rows, 16 * width, threads, [=](int64_t first, int64_t last) {
        for (int64_t n = first; n < last; n++) {
            const float *gate = x + 2 * n * width, *up = gate + width;
            for (int64_t i = 0; i < width; i++) {
                const float e = exp_fast(-std::fabs(gate[i]));  // never overflows
                const float top = gate[i] >= 0.0f ? 1.0f : e;
                y[n * width + i] = gate[i] * (top / (1.0f + e)) * up[i];
            }
        }
    });
}

// One token a row by inverse CDF, and its logprob: `sample_tokens` of token_sampling.py for rows that nothing is cut from.
void draw(const float* logits, const float* temperature, const bool* greedy, const double* uniform, int64_t rows, int64_t vocab, int threads,
          int64_t* token, float* logprob) {
    const Draw d{logits, temperature, greedy, uniform, vocab, token, logprob};
    over_rows(rows, 16 * vocab, threads, [=](int64_t first, int64_t last) { d.rows(first, last); });
}

// Stores the step's keys and values in the rows' blocks and attends, each row to its prompt and its own response.
// `strides`: slot and head strides of the prompts' block, then of the rows', in numbers.
void attend(const float* qkv, const float* norm_qk, float eps, const float* cos, const float* sin, const int64_t* position,
            float* prompt_k, float* prompt_v, const int64_t* prompt_of_row, const int64_t* prompt_length, float* row_k, float* row_v,
            const int64_t* slot, const int64_t* written, const int64_t* strides, int64_t rows, int64_t heads, int64_t key_heads, int64_t width, int64_t window,
            float softcap, int threads, float* out) {
    const float* norm_k = norm_qk ? norm_qk + width : nullptr;
    const Step s{qkv, norm_qk, norm_k, eps, cos, sin, position, {prompt_k, strides[0], strides[1]}, {prompt_v, strides[0], strides[1]},
                 prompt_of_row, prompt_length, {row_k, strides[2], strides[3]}, {row_v, strides[2], strides[3]}, slot, written,
                 heads, key_heads, width, window, softcap, out};
    int64_t seen = 0;
    for (int64_t n = 0; n < rows; n++) {
        const int64_t all = prompt_length[prompt_of_row[n]] + written[n] + 1;
        seen += window ? std::min(all, window) : all;
    }
    over_rows(rows, rows ? 2 * seen / rows * heads * width : 0, threads, [&](int64_t first, int64_t last) {
        // a token reads the keys of the tokens before it in its slot: one thread has them all
        while (first && first < last && slot[first] == slot[first - 1]) first++;
        while (first < last && last < rows && slot[last] == slot[last - 1]) last++;
        switch (width) {
            case 32: return Head<32>::rows(s, first, last);
            case 64: return Head<64>::rows(s, first, last);
            case 128: return Head<128>::rows(s, first, last);
            default: return Head<0>::rows(s, first, last);
        }
    });
}

}
