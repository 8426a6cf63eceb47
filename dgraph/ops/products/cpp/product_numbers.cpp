// Numbers in 8 and 4 bits as vectors of floating ones. product.cpp follows in the same translation unit.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

// Sums that are open at a time are ROWS x OUTPUTS vectors, which the registers of a core hold.
#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 6;
#elif defined(__AVX__)
constexpr int LANES = 8, ROWS = 2;
#else
constexpr int LANES = 4, ROWS = 4;
#endif
constexpr int OUTPUTS = 4;

constexpr int64_t CHUNK = 32;    // columns within which 4-bit numbers change places
constexpr int64_t PANEL = 16;    // rows of the weight, and columns, that are converted before they are multiplied
constexpr int64_t DEPTH = 2048;

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

struct Bfloat16 {
  uint16_t bits;
};

// Rows of numbers that begin with a line of the cache, each a line further than its length: at distances of 4 KiB all
// would fall into the same few lines.
template <typename T>
class Rows {
 public:
  Rows(int64_t rows, int64_t columns) : lines((columns * sizeof(T) + 63) / 64 + 1), held(rows * lines) {}
  int64_t stride() const { return lines * 64 / sizeof(T); }
  T *operator[](int64_t row) { return (T *)&held[row * lines]; }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  int64_t lines;
  std::vector<Line> held;
};

enum Kind { FLOAT8, INT8, INT4 };

template <Kind kind>
constexpr float ZERO = kind == INT4 ? 8.0f : 0.0f;

// weight[r, c] = (values[r, c] - zeros[i, j]) * scales[i, j], i = r / high, j = c / wide
struct Weight {
  const uint8_t *values;
  const float *scales, *zeros;  // no zeros: 0, or 8 of 4-bit numbers
  int64_t rows, columns, high, wide;

  int64_t across() const { return (columns + wide - 1) / wide; }
  float scale(int64_t row, int64_t column) const { return scales[row / high * across() + column / wide]; }
  template <Kind kind>
  float zero(int64_t row, int64_t column) const {
    return zeros ? zeros[row / high * across() + column / wide] : ZERO<kind>;
  }
  // Whether numbers are scaled, and not sums: where a row has several scales, or zeros.
  bool scaled() const { return zeros != nullptr || across() > 1; }
  // Whether a chunk has one scale.
  bool even() const { return across() == 1 || wide % CHUNK == 0; }
};

// -- numbers ----------------------------------------------------------------------------------------------------------

inline float as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

inline void put(float value, float &to) { to = value; }
inline void put(float value, Bfloat16 &to) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  bool nan = value != value;
  to.bits = nan ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to the nearest, ties to even
}
inline float number(float value) { return value; }
inline float number(Bfloat16 value) { return as_float(uint32_t(value.bits) << 16); }

inline Vector load(const float *from) {
  Vector v;
  memcpy(&v, from, sizeof v);
  return v;
}
inline void store(Vector v, float *to) { memcpy(to, &v, sizeof v); }
inline Vector add_product(Vector sums, Vector a, Vector b) { return sums + a * b; }
#if defined(__AVX512BF16__)
inline __m512bh load(const Bfloat16 *from) { return (__m512bh)_mm512_loadu_si512(from); }
inline void store(__m512bh v, Bfloat16 *to) { _mm512_storeu_si512(to, (__m512i)v); }
inline Vector add_product(Vector sums, __m512bh a, __m512bh b) { return (Vector)_mm512_dpbf16_ps((__m512)sums, a, b); }
#endif

template <typename T>
using Numbers = decltype(load((const T *)nullptr));  // a vector of them
template <typename T>
constexpr int PARTS = CHUNK * sizeof(T) / sizeof(Vector);  // vectors of a chunk

// -- what is stored ---------------------------------------------------------------------------------------------------

template <Kind kind>
inline int64_t bytes_of(int64_t columns) { return kind == INT4 ? columns / 2 : columns; }

// Where a column of a chunk goes: of 4-bit numbers, the even columns come first.
template <Kind kind>
inline int64_t place(int64_t i) { return kind == INT4 ? i % 2 * (CHUNK / 2) + i / 2 : i; }
template <Kind kind>
inline int64_t column(int64_t place) { return kind == INT4 ? place % (CHUNK / 2) * 2 + place / (CHUNK / 2) : place; }

inline Integers widen(const uint8_t *from) {  // compilers take bytes apart one by one
  Bytes bytes;
  memcpy(&bytes, from, sizeof bytes);
#if defined(__AVX512F__)
  return (Integers)_mm512_cvtepu8_epi32((__m128i)bytes);
#elif defined(__AVX2__)
  return (Integers)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)bytes));
#else
  return __builtin_convertvector(bytes, Integers);
#endif
}

inline Vector of_integers(Integers v) { return __builtin_convertvector(v, Vector); }

// e4m3: 4 bits of exponent from 7, 3 of mantissa; without an exponent, multiples of 2^-9.
inline Vector of_float8(Integers bits) {
  Integers magnitude = bits & 0x7f, normal = (magnitude << 20) + (120 << 23);
  Integers small = (Integers)(of_integers(magnitude) * 0x1p-9f);
  return (Vector)((magnitude < 8 ? small : normal) | (bits & 0x80) << 24);
}

// The numbers of a chunk, of one scale and zero; those of another kind of vector below.
template <Kind kind, bool scaled, typename T>
struct Decoder {
  float scale, zero;

  void operator()(const uint8_t *chunk, Numbers<T> (&to)[PARTS<T>]) const {
    for (int p = 0; p < PARTS<T>; p++) {
      Integers bits = widen(chunk + (kind == INT4 ? p * LANES % (CHUNK / 2) : p * LANES));
      if (kind == FLOAT8) to[p] = of_float8(bits);
      if (kind == INT8) to[p] = of_integers(bits << 24 >> 24);
      if (kind == INT4) to[p] = of_integers(p < PARTS<T> / 2 ? bits & 15 : bits >> 4);
      if (scaled || kind == INT4) to[p] = (to[p] - zero) * scale;
    }
  }
};

#if defined(__AVX512F__)
// What each number of 4 bits stands for is looked up.
template <bool scaled>
struct Decoder<INT4, scaled, float> {
  __m512 table;

  Decoder(float scale, float zero) {
    __m512 all = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    table = _mm512_mul_ps(_mm512_sub_ps(all, _mm512_set1_ps(zero)), _mm512_set1_ps(scale));
  }
  void operator()(const uint8_t *chunk, Vector (&to)[2]) const {
    __m512i pairs = (__m512i)widen(chunk);  // only 4 bits are looked at
    to[0] = (Vector)_mm512_permutexvar_ps(pairs, table);
    to[1] = (Vector)_mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), table);
  }
};
#endif

#if defined(__AVX512BF16__)
template <Kind kind, bool scaled>
struct Decoder<kind, scaled, Bfloat16> {
  Decoder<kind, scaled, float> wide;

  Decoder(float scale, float zero) : wide{scale, zero} {}
  void operator()(const uint8_t *chunk, __m512bh (&to)[1]) const {
    Vector halves[2];
    wide(chunk, halves);
    to[0] = _mm512_cvtne2ps_pbh((__m512)halves[1], (__m512)halves[0]);
  }
};

template <>
struct Decoder<FLOAT8, false, Bfloat16> {
  __m512i small;  // of bytes without an exponent

  Decoder(float, float) {
    Bfloat16 table[32] = {};
    for (int i = 0; i < 8; i++) put(i * 0x1p-9f, table[i]);
    small = _mm512_loadu_si512(table);
  }
  void operator()(const uint8_t *chunk, __m512bh (&to)[1]) const {
    __m512i bits = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)chunk));
    __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi16(0x7f));
    __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
    __mmask32 tiny = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
    __m512i positive = _mm512_mask_permutexvar_epi16(normal, tiny, magnitude, small);
    __m512i sign = _mm512_and_si512(_mm512_slli_epi16(bits, 8), _mm512_set1_epi16(int16_t(0x8000)));
    to[0] = (__m512bh)_mm512_or_si512(positive, sign);
  }
};

template <bool scaled>
struct Decoder<INT4, scaled, Bfloat16> {
  __m512i table;

  Decoder(float scale, float zero) {
    __m512 wide = Decoder<INT4, scaled, float>(scale, zero).table;
    table = _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(wide));  // 5 bits are looked at
  }
  void operator()(const uint8_t *chunk, __m512bh (&to)[1]) const {
    __m256i pairs = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)chunk));
    __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(pairs), _mm256_srli_epi16(pairs, 4), 1);
    to[0] = (__m512bh)_mm512_permutexvar_epi16(both, table);
  }
};
#endif

inline float sum(Vector v) {
  float total = 0;
  for (int i = 0; i < LANES; i++) total += v[i];
  return total;
}

// to[n] += the sum of v[n]
inline void add_sums(const Vector (&v)[OUTPUTS], float *to) {
#if defined(__AVX512F__)
  auto add = [](__m512 a, __m512 b) { return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); };
  __m512d a = _mm512_castps_pd(add((__m512)v[0], (__m512)v[2])), b = _mm512_castps_pd(add((__m512)v[1], (__m512)v[3]));
  __m512 four = add(_mm512_castpd_ps(a), _mm512_castpd_ps(b));  // of each quarter the sums of v[0], v[1], v[2], v[3]
  __m256 two = _mm256_add_ps(_mm512_castps512_ps256(four), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(four), 1)));
  __m128 one = _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1));
  _mm_storeu_ps(to, _mm_add_ps(_mm_loadu_ps(to), one));
#else
  for (int n = 0; n < OUTPUTS; n++) to[n] += sum(v[n]);
#endif
}

}  // namespace
