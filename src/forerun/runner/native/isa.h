/* The kernels, compiled for one instruction set. */
#include "vector.h"

#include "linear.h"

#include "scores.h"

#if ISA_LEVEL >= 4
#include "tiles.h"
#endif

#include "attend.h"

#include "decoder.h"

#include "memory.h"

#include "top_probs.h"

#undef WIDTH
#undef VECS
#undef GATHERED
#undef vec
#undef ivec
#undef uvec
#undef hvec
#undef INLINE
#undef TILE
#undef VECTOR_ROWS
#undef VECTOR_BLOCKS
#undef MOST_SUMS
#undef AMX_ROWS
#undef IS_TILED
#undef IS_PAIRED
#undef FN
#undef ISA_LEVEL
