"""Tables of NumPy's functions: those that run as library steps, and those that are refused, with the reason."""

from __future__ import annotations

import numpy as np

# Functions whose results' shapes follow from those of the operands and from constants, by their public names.
_NAMES = """
    sort argsort partition argpartition lexsort searchsorted digitize isin median percentile quantile nanmedian
    nanpercentile nanquantile nanargmax nanargmin argmax argmin cumsum cumprod nancumsum nancumprod cumulative_sum
    cumulative_prod diff ediff1d gradient trapezoid interp unwrap concatenate stack hstack vstack dstack
    column_stack block append insert delete resize repeat tile split array_split hsplit vsplit dsplit unstack flip
    fliplr flipud roll rollaxis rot90 pad triu tril diag diagonal diagflat trace linalg.trace linalg.diagonal take
    take_along_axis choose select broadcast_arrays kron cross linalg.cross cov corrcoef vander convolve correlate
    histogram histogram2d einsum inner tensordot vdot outer linalg.outer matrix_transpose swapaxes moveaxis sinc i0
    angle real imag sum prod max min mean round fix nan_to_num array_equiv array_equal linalg.cholesky linalg.cond
    linalg.det linalg.eig linalg.eigh linalg.eigvals linalg.eigvalsh linalg.inv linalg.matrix_norm
    linalg.matrix_power linalg.matrix_rank linalg.multi_dot linalg.norm linalg.pinv linalg.qr linalg.slogdet
    linalg.solve linalg.svd linalg.svdvals linalg.tensorinv linalg.tensorsolve linalg.vector_norm linalg.matmul
    linalg.vecdot linalg.tensordot linalg.matrix_transpose fft.fft fft.ifft fft.fft2 fft.ifft2 fft.fftn fft.ifftn
    fft.rfft fft.irfft fft.rfft2 fft.irfft2 fft.rfftn fft.irfftn fft.hfft fft.ihfft fft.fftshift fft.ifftshift
    astype linspace geomspace logspace polyval polyder
    polyint polyfit bincount linalg.lstsq lib.stride_tricks.sliding_window_view
    packbits unpackbits sort_complex isreal iscomplex unravel_index ravel_multi_index
"""
# Functions whose native forms are for real numbers only: of complex ones they are library steps.
_REALS = "nansum nanprod nanmean nanvar nanstd nanmax nanmin nan_to_num isposinf isneginf"
NATIVE_FOR_REALS = frozenset(_REALS.split())
# Functions of `np.polynomial`, by their modules.
VANDERS = {
    "polynomial": "polyvander",
    "chebyshev": "chebvander",
    "hermite": "hermvander",
    "hermite_e": "hermevander",
    "laguerre": "lagvander",
    "legendre": "legvander",
}
_VANDERS = frozenset(f"polynomial.{module}.{name}" for module, name in VANDERS.items())
LIBRARY = frozenset(_NAMES.split()) | NATIVE_FOR_REALS | _VANDERS

_UNKNOWN_SHAPE = "the shape of its result depends on values; call it outside of the fused function"
_CALLS_ON_ELEMENTS = (
    "it calls a Python function on each element; call that function on the arrays themselves, with np.where for its "
    "branches"
)
_NEEDS_VALUES = (
    "it needs values, which are not known while the function is traced; call it outside of the fused function"
)
_REASONS = {
    _UNKNOWN_SHAPE: """
        unique unique_all unique_counts unique_inverse unique_values
        trim_zeros union1d intersect1d setdiff1d setxor1d histogram_bin_edges histogramdd real_if_close poly
        roots polydiv polyadd polysub polymul
    """,
    _CALLS_ON_ELEMENTS: "vectorize",
    _NEEDS_VALUES: """
        array2string array_repr array_str save savetxt savez savez_compressed datetime_as_string
        busday_count busday_offset is_busday datetime_data may_share_memory shares_memory einsum_path
    """,
}
REFUSED = {name: reason for reason, names in _REASONS.items() for name in names.split()}
NOT_DISPATCHED = ("vectorize", *sorted(_VANDERS))  # others stand for these while a trace runs


def public_name(function: object) -> str:
    """Return a function's name beneath `numpy`, as in "linalg.svd"."""
    module = str(getattr(function, "__module__", None) or "numpy")
    name = str(getattr(function, "__name__", function))
    return f"{module}.{name}".removeprefix("numpy.")


def dispatched_functions() -> dict[str, object]:
    """Return the public functions that NumPy hands to `__array_function__`, by name."""
    found: dict[str, object] = {}
    for space, prefix in ((np, ""), (np.linalg, "linalg."), (np.fft, "fft.")):
        for name, value in sorted(vars(space).items()):
            public = callable(value) and not name.startswith("_") and hasattr(value, "_implementation")
            if public and public_name(value) == prefix + name:
                found[prefix + name] = value
    return found
