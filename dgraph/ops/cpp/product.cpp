// x @ weight.T by a weight in 8 or 4 bits. Numbers become floating only within a core's cache, so that a product reads
// from memory what is stored and nothing else. product_numbers.cpp, which comes before it, says what numbers become.
//
// Sums are in fp32, of vectors along columns or of tiles, and in an order that does not depend on how many rows there
// are.

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define TILES 1
#endif

namespace {

// -- many rows: some of the weight is converted, then multiplied -------------------------------------------------------

// Columns begin..end of a row, whole chunks of them; zeros behind the last one.
template <Kind kind, bool scaled, typename T>
void convert(const Weight &w, int64_t row, int64_t begin, int64_t end, T *to) {
  int64_t whole = std::min(end, w.columns / CHUNK * CHUNK), at = begin;
  const uint8_t *from = w.values + row * bytes_of<kind>(w.columns);
  Numbers<T> numbers[PARTS<T>];
  while (at < whole && w.even()) {
    int64_t stop = std::min((at / w.wide + 1) * w.wide, whole);
    Decoder<kind, scaled, T> decode{scaled ? w.scale(row, at) : 1.0f, w.zero<kind>(row, at)};
    for (; at < stop; at += CHUNK) {
      decode(from + bytes_of<kind>(at), numbers);
      for (int p = 0; p < PARTS<T>; p++) store(numbers[p], to + (at - begin) + p * CHUNK / PARTS<T>);
    }
  }
  for (; at < end; at++) {
    float value = 0;
    if (at < w.columns) {
      uint8_t chunk[CHUNK] = {from[bytes_of<kind>(at)]};
      Vector one[PARTS<float>];
      Decoder<kind, scaled, float>{scaled ? w.scale(row, at) : 1.0f, w.zero<kind>(row, at)}(chunk, one);
      value = one[kind == INT4 && at % 2 ? PARTS<float> / 2 : 0][0];
    }
    put(value, to[(at - begin) / CHUNK * CHUNK + place<kind>(at % CHUNK)]);
  }
}

template <typename T, int M>
inline void tile(const T *x, int64_t x_stride, const T *panel, int64_t stride, int64_t depth, float *sums) {
  Vector total[M][OUTPUTS] = {};
  for (int64_t k = 0; k < depth; k += CHUNK / PARTS<T>) {
    Numbers<T> weights[OUTPUTS];
    for (int n = 0; n < OUTPUTS; n++) weights[n] = load(panel + n * stride + k);
    for (int m = 0; m < M; m++) {
      Numbers<T> of_row = load(x + m * x_stride + k);
      for (int n = 0; n < OUTPUTS; n++) total[m][n] = add_product(total[m][n], of_row, weights[n]);
    }
  }
  for (int m = 0; m < M; m++) add_sums(total[m], sums + m * PANEL);
}

// -- few rows: numbers are converted as they are multiplied ------------------------------------------------------------

// sums[m, n] += x[m, begin:end] . weight[first + n, begin:end]
template <Kind kind, bool scaled, typename T, int M>
void few(const T *x, int64_t x_stride, const Weight &w, int64_t first, int64_t begin, int64_t end, float *sums) {
  Vector total[M][OUTPUTS] = {};
  int64_t rows[OUTPUTS];
  const uint8_t *from[OUTPUTS];
  for (int n = 0; n < OUTPUTS; n++) {
    rows[n] = std::min(first + n, w.rows - 1);
    from[n] = w.values + rows[n] * bytes_of<kind>(w.columns);
  }
  for (int64_t at = begin; at < end;) {
    auto decoder = [&](int64_t row) {
      return Decoder<kind, scaled, T>{scaled ? w.scale(row, at) : 1.0f, w.zero<kind>(row, at)};
    };
    const Decoder<kind, scaled, T> decode[] = {decoder(rows[0]), decoder(rows[1]), decoder(rows[2]), decoder(rows[3])};
    int64_t stop = std::min((at / w.wide + 1) * w.wide, end);
    for (; at < stop; at += CHUNK)
      for (int n = 0; n < OUTPUTS; n++) {
        Numbers<T> numbers[PARTS<T>];
        decode[n](from[n] + bytes_of<kind>(at), numbers);
        for (int p = 0; p < PARTS<T>; p++)
          for (int m = 0; m < M; m++)
            total[m][n] = add_product(total[m][n], load(x + m * x_stride + at + p * CHUNK / PARTS<T>), numbers[p]);
      }
  }
  for (int m = 0; m < M; m++) add_sums(total[m], sums + m * PANEL);
}

// -- products ---------------------------------------------------------------------------------------------------------

// Calls do(constant) with one of 1..M.
template <int M, typename F>
void with(int64_t count, F f) {
  if (count >= M) f(std::integral_constant<int, M>());
  else if constexpr (M > 1) with<M - 1>(count, f);
}

// Some columns of a result: what their sums are multiplied by, and what is added.
template <bool scaled, int64_t MOST>
struct Outputs {
  float scale[MOST], bias[MOST];
  int64_t count;

  Outputs(const Weight &w, const float *of, int64_t first, int64_t count) : count(count) {
    for (int64_t n = 0; n < count; n++) {
      scale[n] = scaled ? 1.0f : w.scales[(first + n) / w.high];
      bias[n] = of ? of[first + n] : 0.0f;
    }
  }
  template <typename X>
  void write(const float *sums, int64_t step, float of_row, X *out) const {
    for (int64_t n = 0; n < count; n++) put(sums[n * step] * (of_row * scale[n]) + bias[n], out[n]);
  }
};

// T: what numbers and rows are multiplied as. X: what rows and results are stored as.
template <Kind kind, bool scaled, typename T, typename X>
void product(const X *x, const float *x_scales, int64_t rows, const Weight &w, const float *bias, X *out, int threads) {
  int64_t columns = (w.columns + CHUNK - 1) / CHUNK * CHUNK;
  Rows<T> copy(rows, columns);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t at = 0; at < columns; at += CHUNK)
      for (int64_t i = 0; i < std::min(CHUNK, w.columns - at); i++)
        put(number(x[r * w.columns + at + i]), copy[r][at + place<kind>(i)]);
  bool at_once = rows <= ROWS && w.columns == columns && w.even();
  int64_t turns = (rows + ROWS - 1) / ROWS;
#pragma omp parallel num_threads(threads)
  {
    Rows<T> panel(PANEL, DEPTH);
    std::vector<float> sums(rows * PANEL);
#pragma omp for
    for (int64_t first = 0; first < w.rows; first += PANEL) {
      int64_t count = std::min(PANEL, w.rows - first);
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (int64_t begin = 0; begin < columns; begin += DEPTH) {
        int64_t end = std::min(begin + DEPTH, columns);
        for (int64_t n = 0; !at_once && n < count; n++) convert<kind, scaled>(w, first + n, begin, end, panel[n]);
        for (int64_t turn = 0; turn < turns; turn++) {  // of rows, as many in each
          int64_t row = turn * rows / turns, next = (turn + 1) * rows / turns;
          with<ROWS>(next - row, [&](auto m) {
            for (int64_t n = 0; n < count; n += OUTPUTS) {
              float *to = &sums[row * PANEL + n];
              if (at_once) few<kind, scaled, T, m>(copy[row], copy.stride(), w, first + n, begin, end, to);
              else tile<T, m>(copy[row] + begin, copy.stride(), panel[n], panel.stride(), end - begin, to);
            }
          });
        }
      }
      const Outputs<scaled, PANEL> outputs(w, bias, first, count);
      for (int64_t m = 0; m < rows; m++)
        outputs.write(&sums[m * PANEL], 1, x_scales ? x_scales[m] : 1.0f, out + m * w.rows + first);
    }
  }
}

#if defined(TILES)
// -- products of tiles: registers that hold 16 rows of 64 bytes, and instructions that multiply them (AMX) -------------

constexpr int64_t HIGH = 16;         // rows of a tile
constexpr int64_t GROUP = 4 * HIGH;  // rows of the weight that are converted at a time
constexpr int64_t STEP = 256;        // columns that are multiplied at a time

// Whether the system lets this process have such registers.
bool tiles_allowed() {
  constexpr int REQUEST = 0x1023, DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool allowed = syscall(SYS_arch_prctl, REQUEST, DATA) == 0;
  return allowed;
}

// 16 x 16 words, turned over.
inline void transpose(__m512i (&v)[16]) {
  __m512i two[16], four[16], eight[16];
  for (int i = 0; i < 16; i += 2) {
    two[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    two[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      four[i + 2 * j] = _mm512_unpacklo_epi64(two[i + j], two[i + j + 2]);
      four[i + 2 * j + 1] = _mm512_unpackhi_epi64(two[i + j], two[i + j + 2]);
    }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; j++) {
      eight[i + j] = _mm512_shuffle_i32x4(four[i + j], four[i + j + 4], 0x88);
      eight[i + j + 4] = _mm512_shuffle_i32x4(four[i + j], four[i + j + 4], 0xdd);
    }
  for (int j = 0; j < 8; j++) {
    v[j] = _mm512_shuffle_i32x4(eight[j], eight[j + 8], 0x88);
    v[j + 8] = _mm512_shuffle_i32x4(eight[j], eight[j + 8], 0xdd);
  }
}

// A chunk of up to 16 rows of x: pairs of columns, of each pair all rows side by side, as the right factor of tiles is.
template <Kind kind>
inline void turn(const Bfloat16 *x, int64_t stride, int64_t rows, int64_t columns, Bfloat16 *to) {
  __mmask32 there = columns < CHUNK ? (1u << columns) - 1 : ~0u;
  alignas(64) uint16_t order[CHUNK];
  for (int64_t i = 0; i < CHUNK; i++) order[i] = column<kind>(i);
  __m512i v[HIGH];
  for (int64_t r = 0; r < HIGH; r++) {
    v[r] = r < rows ? _mm512_maskz_loadu_epi16(there, x + r * stride) : _mm512_setzero_si512();
    if (kind == INT4) v[r] = _mm512_permutexvar_epi16(_mm512_load_si512(order), v[r]);
  }
  transpose(v);
  for (int64_t i = 0; i < HIGH; i++) _mm512_storeu_si512(to + i * 2 * HIGH, v[i]);
}

// Sums of 16 columns of the result by as many rows, of which there are fewer, scaled and written.
template <bool scaled>
inline void write_tile(const float *sums, const Outputs<scaled, GROUP> &outputs, int64_t n, const float *x_scales,
                       int64_t rows, Bfloat16 *out, int64_t stride) {
  __m512i v[HIGH];
  for (int64_t i = 0; i < HIGH; i++) v[i] = _mm512_loadu_si512(sums + i * HIGH);
  transpose(v);
  __m512 scales = _mm512_loadu_ps(outputs.scale + n), bias = _mm512_loadu_ps(outputs.bias + n);
  __mmask16 there = outputs.count - n < HIGH ? (1u << (outputs.count - n)) - 1 : 0xffff;
  for (int64_t m = 0; m < rows; m++) {
    __m512 scale = _mm512_mul_ps(_mm512_set1_ps(x_scales ? x_scales[m] : 1.0f), scales);
    __m512 found = _mm512_fmadd_ps(_mm512_castsi512_ps(v[m]), scale, bias);
    _mm256_mask_storeu_epi16(out + m * stride + n, there, (__m256i)_mm512_cvtneps_pbh(found));
  }
}

struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, unused[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// sums[i, n, m] += weight[n, :depth] . x[i, m, :depth] of two tiles of the weight by `many` of x, 1 or 2.
template <int many>
inline void add_tiles(const Bfloat16 *panel, int64_t stride, const Bfloat16 *x, int64_t x_stride, int64_t depth,
                      float *sums, int64_t sums_stride) {
  constexpr int ROW = HIGH * sizeof(float);
  _tile_loadd(0, sums, ROW);
  _tile_loadd(1, sums + HIGH * HIGH, ROW);
  if (many > 1) _tile_loadd(2, sums + sums_stride, ROW);
  if (many > 1) _tile_loadd(3, sums + sums_stride + HIGH * HIGH, ROW);
  for (int64_t k = 0; k < depth; k += CHUNK) {
    _tile_loadd(4, panel + k, stride * sizeof(Bfloat16));
    _tile_loadd(5, panel + HIGH * stride + k, stride * sizeof(Bfloat16));
    _tile_loadd(6, x + k * HIGH, 2 * HIGH * sizeof(Bfloat16));
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    if (many > 1) _tile_loadd(7, x + x_stride + k * HIGH, 2 * HIGH * sizeof(Bfloat16));
    if (many > 1) _tile_dpbf16ps(2, 4, 7);
    if (many > 1) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, ROW);
  _tile_stored(1, sums + HIGH * HIGH, ROW);
  if (many > 1) _tile_stored(2, sums + sums_stride, ROW);
  if (many > 1) _tile_stored(3, sums + sums_stride + HIGH * HIGH, ROW);
}

template <Kind kind, bool scaled>
void product_by_tiles(const Bfloat16 *x, const float *x_scales, int64_t rows, const Weight &w, const float *bias,
                      Bfloat16 *out, int threads) {
  int64_t columns = (w.columns + CHUNK - 1) / CHUNK * CHUNK, blocks = (rows + HIGH - 1) / HIGH;
  Rows<Bfloat16> turned(blocks, columns * HIGH);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for
    for (int64_t b = 0; b < blocks; b++)
      for (int64_t at = 0; at < columns; at += CHUNK)
        turn<kind>(x + b * HIGH * w.columns + at, w.columns, std::min(HIGH, rows - b * HIGH), w.columns - at,
                   turned[b] + at * HIGH);
    Rows<Bfloat16> panel(GROUP, DEPTH);
    std::vector<float> sums(blocks * GROUP * HIGH);
    TileShapes shapes;
    _tile_loadconfig(&shapes);
#pragma omp for
    for (int64_t first = 0; first < w.rows; first += GROUP) {
      int64_t count = std::min(GROUP, w.rows - first);
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (int64_t begin = 0; begin < columns; begin += DEPTH) {
        int64_t end = std::min(begin + DEPTH, columns);
        for (int64_t n = 0; n < count; n++) convert<kind, scaled>(w, first + n, begin, end, panel[n]);
        for (int64_t at = begin; at < end; at += STEP)
          for (int64_t b = 0; b < blocks; b += 2)
            for (int64_t n = 0; n < count; n += 2 * HIGH) {
              auto add = b + 1 < blocks ? add_tiles<2> : add_tiles<1>;
              add(panel[n] + at - begin, panel.stride(), turned[b] + at * HIGH, turned.stride(),
                  std::min(STEP, end - at), &sums[(b * GROUP + n) * HIGH], GROUP * HIGH);
            }
      }
      const Outputs<scaled, GROUP> outputs(w, bias, first, count);
      for (int64_t m = 0; m < rows; m += HIGH)
        for (int64_t n = 0; n < count; n += HIGH)
          write_tile(&sums[m * GROUP + n * HIGH], outputs, n, x_scales ? x_scales + m : nullptr,
                     std::min(HIGH, rows - m), out + m * w.rows + first, w.rows);
    }
    _tile_release();
  }
}
#endif

template <Kind kind>
void of_kind(const void *x, bool half, const float *x_scales, int64_t rows, const Weight &w, const float *bias,
             void *out, int threads) {
#if defined(__AVX512BF16__)
  using Narrow = Bfloat16;
#else
  using Narrow = float;
#endif
  auto call = [&](auto scaled) {
#if defined(TILES)
    if (half && tiles_allowed())
      return product_by_tiles<kind, scaled>((const Bfloat16 *)x, x_scales, rows, w, bias, (Bfloat16 *)out, threads);
#endif
    if (half) product<kind, scaled, Narrow>((const Bfloat16 *)x, x_scales, rows, w, bias, (Bfloat16 *)out, threads);
    else product<kind, scaled, float>((const float *)x, x_scales, rows, w, bias, (float *)out, threads);
  };
  w.scaled() ? call(std::true_type()) : call(std::false_type());
}

}  // namespace

// x [rows, columns] and out [rows, outputs] are float, or bfloat16 if `half`; each row of x is multiplied by its entry
// of x_scales, if given. Values are as `QuantisedWeight` has them, of a kind: 0 float8, 1 int8, 2 int4; high and wide are
// rows and columns that share a scale, none of them `WHOLE`.
extern "C" void multiply(const void *x, int half, const float *x_scales, int64_t rows, const uint8_t *values, int kind,
                         const float *scales, const float *zeros, int64_t outputs, int64_t columns, int64_t high,
                         int64_t wide, const float *bias, void *out, int threads) {
  Weight w{values, scales, zeros, outputs, columns, high, wide};
  auto call = kind == FLOAT8 ? of_kind<FLOAT8> : kind == INT8 ? of_kind<INT8> : of_kind<INT4>;
  call(x, half != 0, x_scales, rows, w, bias, out, threads);
}
