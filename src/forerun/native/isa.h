/* The kernels, compiled for one instruction set. */
#include "vector.h"

#include "linear.h"

#include "attend.h"

#include "decoder.h"

#include "memory.h"

#undef v16
#undef i16
#undef u16
#undef h16
#undef INLINE
#undef TILE
#undef MOST_ROWS
#undef BLOCKS
#undef IS_PAIRED
#undef FN
#undef ISA_LEVEL
