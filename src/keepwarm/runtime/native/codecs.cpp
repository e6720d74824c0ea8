// Decodes blocks of quantized KV directly into the place where the KV is used.

#include "codes.h"

extern "C" {

// Writes the first `wanted` of a block's tokens. Strides are bytes from head to head. Returns 0, or 1 for an element size
// that it does not know and for more than MOST_CHANNELS channels.
int keepwarm_decode(const char* packed, int64_t packed_stride, char* out, int64_t out_stride, int64_t heads, int64_t dim,
                    int itemsize, int kv, const Coding* how, int64_t wanted) {
    if (dim > MOST_CHANNELS || (itemsize != 2 && itemsize != 4)) return 1;
    for (int64_t h = 0; h < heads; ++h, packed += packed_stride, out += out_stride) {
        if (itemsize == 2) decode_rows(*how, packed, kv, dim, 0, wanted, (bf16*)out);
        else decode_rows(*how, packed, kv, dim, 0, wanted, (float*)out);
    }
    return 0;
}

}  // extern "C"
