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

constexpr int64_t HIGH = 16, LINE = 64;            // rows of a tile, and bytes of each
constexpr int64_t GROUP = 4 * HIGH;                // rows of the weight that are taken at a time
constexpr int64_t PANEL_BYTES = 2 * DEPTH, STEP = 512;  // bytes of each that are converted, and multiplied at a time

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

// 64 bytes of up to 16 rows of x: words of columns, of each word all rows side by side, as the right factor of tiles is.
template <Kind kind>
inline void turn(const char *x, int64_t stride, int64_t rows, int64_t bytes, char *to) {
  __mmask64 there = bytes < LINE ? (1ull << bytes) - 1 : ~0ull;
  alignas(64) uint16_t order[CHUNK];
  for (int64_t i = 0; i < CHUNK; i++) order[i] = column<kind>(i);
  __m512i v[HIGH];
  for (int64_t r = 0; r < HIGH; r++) {
    v[r] = r < rows ? _mm512_maskz_loadu_epi8(there, x + r * stride) : _mm512_setzero_si512();
    if (kind == INT4) v[r] = _mm512_permutexvar_epi16(_mm512_load_si512(order), v[r]);
  }
  transpose(v);
  for (int64_t i = 0; i < HIGH; i++) _mm512_storeu_si512(to + i * LINE, v[i]);
}

// All rows of x so, 16 after 16, of so many bytes: whole lines.
template <Kind kind>
class Turned {
 public:
  Turned(int64_t rows, int64_t bytes) : held((rows + HIGH - 1) / HIGH, bytes * HIGH) {}
  void take(const void *x, int64_t rows, int64_t bytes) {  // by all threads
#pragma omp for
    for (int64_t r = 0; r < rows; r += HIGH)
      for (int64_t at = 0; at < bytes; at += LINE)
        turn<kind>((const char *)x + r * bytes + at, bytes, std::min(HIGH, rows - r), bytes - at,
                   held[r / HIGH] + at * HIGH);
  }
  int64_t stride() const { return held.stride(); }
  const char *at(int64_t block, int64_t byte) { return held[block] + byte * HIGH; }

 private:
  Rows<char> held;
};

inline __m512 as_floats(__m512i sums, float) { return _mm512_castsi512_ps(sums); }
inline __m512 as_floats(__m512i sums, int32_t) { return _mm512_cvtepi32_ps(sums); }
inline void store_some(__m512 v, __mmask16 there, float *to) { _mm512_mask_storeu_ps(to, there, v); }
inline void store_some(__m512 v, __mmask16 there, Bfloat16 *to) {
  _mm256_mask_storeu_epi16(to, there, (__m256i)_mm512_cvtneps_pbh(v));
}

// Sums of 16 columns of the result by as many rows, of which there are fewer, scaled and written.
template <typename Sum, bool scaled, typename X>
inline void write_tile(const Sum *sums, const Outputs<scaled, GROUP> &outputs, int64_t n, const float *x_scales,
                       int64_t rows, X *out, int64_t stride) {
  __m512i v[HIGH];
  for (int64_t i = 0; i < HIGH; i++) v[i] = _mm512_loadu_si512(sums + i * HIGH);
  transpose(v);
  __m512 scales = _mm512_loadu_ps(outputs.scale + n), bias = _mm512_loadu_ps(outputs.bias + n);
  __mmask16 there = outputs.count - n < HIGH ? (1u << (outputs.count - n)) - 1 : 0xffff;
  for (int64_t m = 0; m < rows; m++) {
    __m512 scale = _mm512_mul_ps(_mm512_set1_ps(x_scales ? x_scales[m] : 1.0f), scales);
    store_some(_mm512_fmadd_ps(as_floats(v[m], Sum()), scale, bias), there, out + m * stride + n);
  }
}

struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, unused[14] = {};
  uint16_t bytes[16] = {LINE, LINE, LINE, LINE, LINE, LINE, LINE, LINE};
  uint8_t rows[16] = {HIGH, HIGH, HIGH, HIGH, HIGH, HIGH, HIGH, HIGH};
};

// sums[i, n, m] += weight[n, :bytes] . x[i, m, :bytes] of two tiles of the weight by `many` of x, 1 or 2: of bfloat16, or
// of int8 into int32.
template <int many, typename Sum>
inline void add_tiles(const char *weight, int64_t stride, const char *x, int64_t x_stride, int64_t bytes, Sum *sums,
                      int64_t sums_stride) {
  constexpr bool integers = std::is_same<Sum, int32_t>::value;
  _tile_loadd(0, sums, LINE);
  _tile_loadd(1, sums + HIGH * HIGH, LINE);
  if (many > 1) _tile_loadd(2, sums + sums_stride, LINE);
  if (many > 1) _tile_loadd(3, sums + sums_stride + HIGH * HIGH, LINE);
  for (int64_t k = 0; k < bytes; k += LINE) {
    _tile_loadd(4, weight + k, stride);
    _tile_loadd(5, weight + HIGH * stride + k, stride);
    _tile_loadd(6, x + k * HIGH, LINE);
    if (many > 1) _tile_loadd(7, x + x_stride + k * HIGH, LINE);
    if (integers) {
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 5, 6);
      if (many > 1) _tile_dpbssd(2, 4, 7);
      if (many > 1) _tile_dpbssd(3, 5, 7);
    } else {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
      if (many > 1) _tile_dpbf16ps(2, 4, 7);
      if (many > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, LINE);
  _tile_stored(1, sums + HIGH * HIGH, LINE);
  if (many > 1) _tile_stored(2, sums + sums_stride, LINE);
  if (many > 1) _tile_stored(3, sums + sums_stride + HIGH * HIGH, LINE);
}

// A product by tiles, GROUP rows of the weight at a time. of_weight(first, count, begin, end, panel): bytes begin..end of
// these rows as the left factor, from where they lie, and how far apart.
template <Kind kind, typename Sum, bool scaled, typename X, typename F>
void product_by_tiles(const void *x, int64_t bytes, const float *x_scales, int64_t rows, const Weight &w,
                      const float *bias, X *out, int threads, F of_weight) {
  int64_t whole = (bytes + LINE - 1) / LINE * LINE, blocks = (rows + HIGH - 1) / HIGH;
  Turned<kind> turned(rows, whole);
#pragma omp parallel num_threads(threads)
  {
    turned.take(x, rows, bytes);
    Rows<char> panel(GROUP, PANEL_BYTES);
    std::vector<Sum> sums(blocks * GROUP * HIGH);
    TileShapes shapes;
    _tile_loadconfig(&shapes);
#pragma omp for
    for (int64_t first = 0; first < w.rows; first += GROUP) {
      int64_t count = std::min(GROUP, w.rows - first);
      std::fill(sums.begin(), sums.end(), Sum(0));
      for (int64_t begin = 0; begin < whole; begin += PANEL_BYTES) {
        int64_t end = std::min(begin + PANEL_BYTES, whole), stride;
        const char *weight = of_weight(first, count, begin, end, panel, stride);
        for (int64_t at = begin; at < end; at += STEP)
          for (int64_t b = 0; b < blocks; b += 2)
            for (int64_t n = 0; n < count; n += 2 * HIGH) {
              auto add = b + 1 < blocks ? add_tiles<2, Sum> : add_tiles<1, Sum>;
              add(weight + n * stride + at - begin, stride, turned.at(b, at), turned.stride(), std::min(STEP, end - at),
                  &sums[(b * GROUP + n) * HIGH], GROUP * HIGH);
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

// Rows of bfloat16 by stored numbers, which become that.
template <Kind kind, bool scaled>
void converted_by_tiles(const Bfloat16 *x, const float *x_scales, int64_t rows, const Weight &w, const float *bias,
                        Bfloat16 *out, int threads) {
  auto of_weight = [&](int64_t first, int64_t count, int64_t begin, int64_t end, Rows<char> &panel, int64_t &stride) {
    stride = panel.stride();
    for (int64_t n = 0; n < count; n++)
      convert<kind, scaled>(w, first + n, begin / 2, end / 2, (Bfloat16 *)panel[n]);
    return (const char *)panel[0];
  };
  product_by_tiles<kind, float, scaled>(x, 2 * w.columns, x_scales, rows, w, bias, out, threads, of_weight);
}

// Rows of int8 by stored int8, which are read where they lie, but for what tiles would read beyond them.
template <typename X>
void numbers_by_tiles(const int8_t *x, const float *x_scales, int64_t rows, const Weight &w, const float *bias, X *out,
                      int threads) {
  auto of_weight = [&](int64_t first, int64_t count, int64_t begin, int64_t end, Rows<char> &panel, int64_t &stride) {
    const char *from = (const char *)w.values + first * w.columns + begin;
    stride = w.columns;
    if (count % (2 * HIGH) == 0 && end <= w.columns) return from;
    stride = panel.stride();
    for (int64_t n = 0; n < count; n++) {
      int64_t there = std::min(end, w.columns) - begin;
      memcpy(panel[n], from + n * w.columns, there);
      memset(panel[n] + there, 0, end - begin - there);
    }
    return (const char *)panel[0];
  };
  product_by_tiles<INT8, int32_t, false>(x, w.columns, x_scales, rows, w, bias, out, threads, of_weight);
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
      return converted_by_tiles<kind, scaled>((const Bfloat16 *)x, x_scales, rows, w, bias, (Bfloat16 *)out, threads);
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

// x [rows, columns] and the weight in int8, otherwise as above: sums are of int32. 0: this CPU has no tiles.
extern "C" int multiply_numbers(const int8_t *x, const float *x_scales, int64_t rows, const uint8_t *values,
                                const float *scales, int64_t outputs, int64_t columns, int64_t high, const float *bias,
                                void *out, int half, int threads) {
#if defined(TILES)
  if (!tiles_allowed()) return 0;
  Weight w{values, scales, nullptr, outputs, columns, high, columns};
  if (half) numbers_by_tiles(x, x_scales, rows, w, bias, (Bfloat16 *)out, threads);
  else numbers_by_tiles(x, x_scales, rows, w, bias, (float *)out, threads);
  return 1;
#else
  return 0;
#endif
}
