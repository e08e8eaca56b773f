// CUDA's driver without a GPU: notes what it is told to launch, and encodes tensor maps as what it is asked for.
#define _POSIX_C_SOURCE 200809L
#include <stdint.h>
#include <string.h>
#include <time.h>

#define MOST_RECORDS 8192
#define MOST_BYTES 2048

typedef struct {
    int id, padding, value[16];
} Attribute;

typedef struct {
    unsigned grid[3], block[3], shared;
    uint64_t stream;
    const Attribute* attributes;
    unsigned attribute_count;
} Config;

typedef struct {
    uint64_t function, stream;
    unsigned grid[3], block[3], shared, attribute_count;
    int attribute, value;
    uint64_t nbytes;
    unsigned char bytes[MOST_BYTES];
} Record;

Record records[MOST_RECORDS];
unsigned record_count, struct_bytes, sized, map_count;
int encode_status;
int (*during_launch)(void);  // what happens while a launch is under way; returns its status
volatile unsigned waiting, released;

// What happens while a stream is full: waits two seconds at most until `released` is set, by another thread.
int wait_for_release(void) {
    const struct timespec millisecond = {0, 1000000};
    waiting = 1;
    for (int k = 0; k < 2000 && !released; ++k) {
        nanosleep(&millisecond, NULL);
    }
    return !released;
}

int cuLaunchKernelEx(const Config* config, uint64_t function, void** arguments, void** extra) {
    const int status = during_launch == NULL ? 0 : during_launch();
    if (status != 0) {
        return status;
    }
    Record* record = &records[__atomic_fetch_add(&record_count, 1, __ATOMIC_RELAXED) % MOST_RECORDS];
    record->function = extra == NULL ? function : 0;
    record->stream = config->stream;
    memcpy(record->grid, config->grid, sizeof record->grid);
    memcpy(record->block, config->block, sizeof record->block);
    record->shared = config->shared;
    record->attribute_count = config->attribute_count;
    record->attribute = config->attribute_count ? config->attributes->id : 0;
    record->value = config->attribute_count ? config->attributes->value[0] : 0;
    record->nbytes = sized ? *(const uint64_t*)function : struct_bytes;
    memcpy(record->bytes, arguments[0], record->nbytes);
    return 0;
}

int cuTensorMapEncodeTiled(
    uint64_t* map, int type, unsigned rank, uint64_t address, const uint64_t* sizes, const uint64_t* strides, const unsigned* box,
    const unsigned* steps, int interleave, int swizzle, int promotion, int fill
) {
    ++map_count;
    if ((uintptr_t)map % 64 != 0) {
        return 1;
    }
    const uint64_t words[] = {type,   rank,   address,  sizes[0], sizes[1], strides[0], box[0],
                              box[1], steps[0], steps[1], interleave, swizzle,  promotion,  fill, 0x5eed, 0};
    memcpy(map, words, sizeof words);
    return encode_status;
}
