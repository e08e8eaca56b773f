// How the results of gemm.cu go to memory: a warp stages a panel of each in shared memory, 16 rows of Panel elements. The copy
// engine stores it while the warp computes what follows; where rows begin at any element, the warp's lanes store it.
//
// Shape has panel, panels and panel_bytes: the columns of a panel, how many a warp has, and the bytes of one for all results; and
// shifted, whether rows may begin at any element. A warp's panels begin at a multiple of panel_alignment.
#pragma once

#include "stages.cuh"
#include "tensor_cores.cuh"

constexpr int panel_alignment = 128;  // bytes: where the copy engine reads

// A panel of one result in shared memory. `first` is the result's first byte among those of an element. Pieces of 16 bytes are
// swizzled as the copy engine has them, by 3, 2 or 1 bits of the address: of rows of 128, 64 or 32 bytes. If Shifted, rows are
// not swizzled but 8 elements longer: each is staged as many elements late as it begins behind a multiple of 8 in memory, so
// that a pack of 16 bytes here is one there; what a panel leaves of a pack is kept for the next one.
template <int Panel, class T, bool Shifted>
struct Staging {
    static constexpr int line = (Panel + (Shifted ? 8 : 0)) * sizeof(T), pieces = line / 16;
    static_assert(sizeof(T) == 2 || sizeof(T) == 4, "shifted rows have packs of up to 8 elements");
    static_assert(Shifted || (pieces & (pieces - 1)) == 0 && pieces <= 8, "rows that the copy engine swizzles");
    char* at;

    __device__ __forceinline__ Staging(char* panel, int first) : at(panel + 16 * (line / static_cast<int>(sizeof(T))) * first) {}
    __device__ __forceinline__ T* element(int row, int col) const {
        const u32 byte = row * line + col * static_cast<int>(sizeof(T));
        const u32 turned = Shifted ? 0 : ((shared_address(at) + byte) >> 7 & (pieces - 1)) * 16;
        return reinterpret_cast<T*>(at + (byte ^ turned));
    }
};

// The panels of a warp, each of which holds all results: of two, the copy engine reads one while the other is staged.
template <class Shape>
struct StagedPanels {
    char* memory;
    u32 used = 0;  // panels that were stored

    __device__ __forceinline__ char* current() const { return memory + used % Shape::panels * Shape::panel_bytes; }
    // Wait until the current panel may be written. All lanes call it: the first one waits for its stores, the others for it.
    __device__ __forceinline__ void begin() const {
        if (!Shape::shifted) {
            stores_wait_until_read<Shape::panels - 1>();
        }
        __syncwarp(0xffffffffu);
    }
};

// Where rows of a result begin in memory. Unless Shifted, the stride is a multiple of 16 bytes.
template <class T, bool Shifted>
struct Shifts {
    u32 first, stride;
    bool aligned;  // all rows begin at multiples of 16 bytes

    __device__ __forceinline__ Shifts(const T* to, i64 rows_stride)
        : first(static_cast<u32>(reinterpret_cast<u64>(to) / sizeof(T))), stride(static_cast<u32>(rows_stride)),
          aligned((reinterpret_cast<u64>(to) | (Shifted ? static_cast<u64>(rows_stride) * sizeof(T) : 0)) % 16 == 0) {}
    // Elements by which the columns of a tile begin behind a multiple of 8 in a row; 0 if all are aligned.
    __device__ __forceinline__ int of_row(i64 row) const {
        return !Shifted || aligned ? 0 : static_cast<int>((first + static_cast<u32>(row) * stride) % 8);
    }
};

// Stages V elements of a result, at (row, col) of a warp's panel. That row is `of_matrix` in the matrix.
template <int Panel, bool Shifted>
struct StageResult {
    char* panel;
    i64 of_matrix;
    int row, col;

    template <int First, class T, int V>
    __device__ __forceinline__ void operator()(At<First>, const Pack<T, V>& pack, const T* to, i64 stride) const {
        const int shift = Shifts<T, Shifted>(to, stride).of_row(of_matrix);
        T* const at = Staging<Panel, T, Shifted>(panel, First).element(row, col + shift);
        if (shift % V == 0) {
            store_pack<V>(at, pack);
        } else {
#pragma unroll
            for (int v = 0; v < V; ++v) {
                at[v] = pack.v[v];
            }
        }
    }
};

// Stores a warp's panel of one result, whose first element goes to (row, col), and which may end beyond the last row or column:
// by the copy engine, or by elements where the result does not begin at a multiple of 16 bytes. Its rows have such lengths.
template <int Panel>
struct StorePanel {
    char* panel;
    i64 row, col, m, n;

    template <int First, class T>
    __device__ __forceinline__ void operator()(At<First>, T* to, i64 stride, const TensorMap& map) const {
        const Staging<Panel, T, false> from(panel, First);
        const int lane = threadIdx.x % 32;
        if (reinterpret_cast<u64>(to) % 16 == 0) {  // else there is no map
            if (lane == 0) {
                tensor_store(map, static_cast<int>(col), static_cast<int>(row), from.at);
            }
            return;
        }
#pragma unroll 1
        for (int i = lane; i < 16 * Panel; i += 32) {
            const i64 at_row = row + i / Panel, at_col = col + i % Panel;
            if (at_row < m && at_col < n) {
                to[at_row * stride + at_col] = *from.element(i / Panel, i % Panel);
            }
        }
    }
};

// The same of a result whose rows may begin at any element. Lanes write neighbouring packs of 16 bytes; those at the ends of a
// tile's rows may be stored by elements, and those cut by the end of a panel are left to the next: `is_first` and `is_last` tell
// where a tile begins and ends. Rows that are padded are aligned, but may end in a pack.
template <int Panel>
struct StoreShifted {
    char* panel;
    i64 row, col, m, n;
    bool is_first, is_last;

    template <int First, class T>
    __device__ __forceinline__ void operator()(At<First>, T* to, i64 stride) const {
        constexpr int V = 16 / sizeof(T);
        const Staging<Panel, T, true> from(panel, First);
        const Shifts<T, true> shifts(to, stride);
        const int rows = static_cast<int>(m - row < 16 ? m - row : 16);
        const int cols = static_cast<int>(n - col < Panel ? n - col : Panel);
        to += row * stride + col;
#pragma unroll
        for (int i = 0; i < 16 * Panel / V / 32; ++i) {
            const int pack = i * 32 + threadIdx.x % 32, down = pack / (Panel / V), staged = pack % (Panel / V) * V;
            const int across = staged - shifts.of_row(row + down);
            if (down < rows && across + V <= cols && (across >= 0 || !is_first)) {
                store_global<V>(to + down * stride + across, load_pack<V>(from.element(down, staged)));
            }
        }
        if (shifts.aligned ? is_last && cols % V != 0 : is_first || is_last) {
            store_ends<V>(from, shifts, to, stride, rows, cols);
        }
        if (!is_last && !shifts.aligned) {
            keep_ends<V>(from);
        }
    }

    // The elements of a tile's rows that are before its first whole pack, or behind its last one.
    template <int V, class T>
    __device__ __forceinline__ void store_ends(
        const Staging<Panel, T, true>& from, const Shifts<T, true>& shifts, T* to, i64 stride, int rows, int cols) const {
#pragma unroll 1
        for (int lane = threadIdx.x % 32; lane < 16 * 8; lane += 32) {
            const int down = lane / 8, shift = shifts.of_row(row + down);
            const int before = is_first ? (V - shift % V) % V : -shift;  // the column of the first whole pack
            const int whole = (cols + shift) / V * V, from_end = (whole < Panel ? whole : Panel) - shift + lane % 8;
            if (is_first && down < rows && lane % 8 < before && lane % 8 < cols) {
                to[down * stride + lane % 8] = *from.element(down, lane % 8 + shift);
            }
            if (is_last && down < rows && from_end >= before && from_end < cols) {
                to[down * stride + from_end] = *from.element(down, from_end + shift);
            }
        }
    }

    // Move the elements behind the panel's last pack to where the next panel starts.
    template <int V, class T>
    __device__ __forceinline__ void keep_ends(const Staging<Panel, T, true>& from) const {
        const int lane = threadIdx.x % 32, down = lane / (8 / V), at = lane % (8 / V) * V;
        __syncwarp(0xffffffffu);
        if (down < 16) {
            store_pack<V>(from.element(down, at), load_pack<V>(from.element(down, Panel + at)));
        }
    }
};

// Store a warp's current panel of all results, by all of its lanes, and go on to the next one. Its first element goes to
// (row, col); `is_first` and `is_last` tell whether its columns are the first and the last ones of the tile.
template <class Shape, class P>
__device__ __forceinline__ void store_panel(
    const P& p, StagedPanels<Shape>& panels, i64 row, i64 col, bool is_first, bool is_last) {
    constexpr int panel = Shape::panel;
    if constexpr (Shape::shifted) {
        __syncwarp(0xffffffffu);
        p.targets(At<0>(), StoreShifted<panel>{panels.current(), row, col, p.rows, p.cols, is_first, is_last});
    } else {
        stores_fence();
        __syncwarp(0xffffffffu);
        p.targets(At<0>(), StorePanel<panel>{panels.current(), row, col, p.rows, p.cols});
        stores_commit();
    }
    ++panels.used;
}
