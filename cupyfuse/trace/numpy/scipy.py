"""SciPy's functions while a function is traced: library steps, which run SciPy's own or `cupyx.scipy`'s.

SciPy's ufuncs dispatch as NumPy's do, and functions such as `scipy.special.logsumexp` are NumPy code, which traces. The
functions here call compiled code. Only modules that the user has imported are touched.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import Any

import numpy as np

from ...ir.library import NamedFunction
from ..library import call_library, tracers_in
from ..tracer import Tracer
from ..user_code import fail, user_line
from .lists import replacements as replacements_in
from .signatures import names_of_parameters
from .writing import target_of

# Functions whose results' shapes and dtypes follow from those of the operands and from constants.
FUNCTIONS: dict[str, str] = {
    "scipy.special": """
        assoc_legendre_p assoc_legendre_p_all binom comb diric factorial factorial2 factorialk h1vp h2vp ivp jvp kvp
        legendre_p legendre_p_all multigammaln perm polygamma sph_harm_y sph_harm_y_all sph_legendre_p
        sph_legendre_p_all spherical_in spherical_jn spherical_kn spherical_yn stirling2 yvp zeta
    """,
    "scipy.linalg": """
        block_diag cho_factor cho_solve cholesky circulant coshm cosm det eigh eigvalsh expm hankel inv logm lstsq lu
        lu_factor lu_solve norm pinv pinvh polar qr signm sinhm sinm solve solve_banded solve_continuous_lyapunov
        solve_discrete_lyapunov solve_sylvester solve_toeplitz solve_triangular sqrtm svd svdvals tanhm tanm toeplitz
    """,
    "scipy.spatial": "distance_matrix procrustes",
    "scipy.spatial.distance": """
        braycurtis canberra cdist chebyshev cityblock correlation cosine euclidean hamming jaccard jensenshannon
        mahalanobis minkowski pdist seuclidean sqeuclidean squareform
    """,
    "scipy.ndimage": """
        affine_transform binary_closing binary_dilation binary_erosion binary_fill_holes binary_opening black_tophat
        convolve convolve1d correlate correlate1d distance_transform_edt gaussian_filter gaussian_filter1d
        gaussian_gradient_magnitude gaussian_laplace grey_closing grey_dilation grey_erosion grey_opening label
        laplace map_coordinates maximum_filter maximum_filter1d median_filter minimum_filter minimum_filter1d
        morphological_gradient percentile_filter prewitt rank_filter rotate shift sobel spline_filter uniform_filter
        uniform_filter1d white_tophat zoom
    """,
    "scipy.signal": """
        convolve convolve2d correlate correlate2d csd coherence decimate deconvolve detrend fftconvolve filtfilt
        hilbert lfilter medfilt medfilt2d oaconvolve order_filter periodogram resample resample_poly savgol_filter
        sepfir2d sosfilt sosfiltfilt spectrogram stft istft upfirdn welch wiener
    """,
    "scipy.fft": """
        dct dctn dst dstn fft fft2 fftn fftshift hfft idct idctn idst idstn ifft ifft2 ifftn ifftshift ihfft irfft
        irfft2 irfftn rfft rfft2 rfftn
    """,
    "scipy.integrate": "cumulative_simpson cumulative_trapezoid romb simpson trapezoid",
    "scipy.optimize": "linear_sum_assignment nnls",
    "scipy.stats": """
        boxcox_llf circmean circstd circvar describe differential_entropy entropy gmean hmean iqr gstd kendalltau
        ks_1samp ks_2samp kstat kstest kurtosis kurtosistest linregress mannwhitneyu median_abs_deviation moment
        normaltest pearsonr rankdata sem shapiro skew skewtest spearmanr theilslopes tmean trim_mean tstd ttest_1samp
        ttest_ind ttest_rel tvar variation wasserstein_distance wilcoxon zmap zscore
    """,
}
# Methods of the classes of scipy.stats' named distributions.
METHODS: dict[str, str] = {
    "rv_continuous": "pdf logpdf cdf logcdf sf logsf ppf isf",
    "rv_discrete": "pmf logpmf cdf logcdf sf logsf ppf isf",
    "_multivariate.multivariate_normal_gen": "pdf logpdf cdf logcdf",
    "_multivariate.dirichlet_gen": "pdf logpdf",
    "_multivariate.invwishart_gen": "pdf logpdf",
    "_multivariate.matrix_normal_gen": "pdf logpdf",
    "_multivariate.multivariate_t_gen": "pdf logpdf",
    "_multivariate.wishart_gen": "pdf logpdf",
}


# Classes of scipy.spatial whose compiled code crashes the process where it is given another object than an array.
_CRASHING = ("ConvexHull", "Delaunay", "HalfspaceIntersection", "Voronoi")


def _refusing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the `__init__` of a class that refuses traced arrays."""

    @wraps(original)
    def call(self: Any, *args: Any, **options: Any) -> None:
        """Initialise the object, or raise if an argument is traced."""
        if next(tracers_in((args, options)), None) is not None:
            fail(name, "its compiled code reads arrays in memory; call it outside of the fused function")
        original(self, *args, **options)

    return call


def as_library_step(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is a library step for traced arrays, and `original` for all else."""

    @wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        """Add a library step if an argument is traced, else call the library's function."""
        if next(tracers_in((args, options)), None) is None:
            return original(*args, **options)
        args, options, written = _split_output(original, args, options)
        target = None if written is None else target_of(f"{name} with an array for its result", written)
        # overwrite_a and the like: the operands may be the caller's, and other steps read them.
        given = {k: _by_name(v) for k, v in options.items() if not k.startswith("overwrite_")}
        result = call_library(name, [_by_name(a) for a in args], given)
        return result if target is None else _written_to(target, result, name)

    return call


def _written_to(target: Tracer, result: Any, name: str) -> Tracer:
    """Write the result of a call to the array that was given for it, whose shape and dtype are the result's."""
    if not isinstance(result, Tracer):
        fail(f"{name} with an array for one of its results", "assign what it returns instead, as in y[...] = f(x)[0]")
    if (result.shape, result.dtype) != (target.shape, target.dtype):
        raise ValueError(
            f"{name}: the array for its result is {target.dtype} of shape {target.shape}, expected {result.dtype} of "
            f"shape {result.shape}\n  at {user_line()}"
        )
    return target._assign_all(result)


def _split_output(
    original: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return the arguments of a call with None for the array that it writes its result to, and that array, if any.

    Functions of scipy.ndimage, which call it `output`, are given its dtype in its place.
    """
    names = names_of_parameters(original)
    for label in ("out", "output"):
        place = names.index(label) if label in names else len(args)
        given = args[place] if place < len(args) else options.get(label)
        if isinstance(given, (Tracer, np.ndarray)):
            rest = np.dtype(given.dtype) if label == "output" else None
            if place < len(args):
                return (*args[:place], rest, *args[place + 1 :]), options, given
            return args, options | {label: rest}, given
    return args, options, None


def _by_name(value: Any) -> Any:
    """Return a method of a named distribution as a `NamedFunction`, other values as they are."""
    if isinstance(value, types.MethodType) and is_distribution(value.__self__):
        return NamedFunction(f"scipy.stats.{_name_of(value.__self__)}.{value.__name__}")
    return value


def _method_as_library_step(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of distributions that is a library step for traced arrays, and `original` for all else."""

    @wraps(original)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        """Add a library step if an argument is traced, else call SciPy's method."""
        if next(tracers_in((args, options)), None) is None:
            return original(self, *args, **options)
        return call_library(f"scipy.stats.{_name_of(self)}.{name}", args, options)

    return call


def _name_of(distribution: Any) -> str:
    """Return the name of a distribution in scipy.stats."""
    named: str = getattr(distribution, "name", None) or type(distribution).__name__.removesuffix("_gen")
    return named


def is_distribution(value: Any) -> bool:
    """Whether an object is one of the named distributions of scipy.stats, which do not change."""
    if not type(value).__module__.startswith("scipy.stats."):
        return False
    named = getattr(sys.modules.get("scipy.stats"), _name_of(value), None)
    return named is value and isinstance(value, tuple(cls for cls, _, _ in _find_in_stats(sys.modules["scipy.stats"])))


def is_multimethod(value: Any) -> bool:
    """Whether an object is one of SciPy's functions that choose what they call.

    These are functions with backends, as those of `scipy.fft`, and those that choose among ufuncs, as `sph_harm_y`.
    """
    cls = type(value)
    if (cls.__module__, cls.__name__) == ("scipy.special._multiufuncs", "MultiUFunc"):
        return True
    is_function = cls.__name__ == "_Function" and cls.__module__.rpartition(".")[2] in ("uarray", "_uarray")
    return is_function and str(value.__module__).startswith("scipy.")


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """Yield SciPy's functions and methods to replace: (imported module or class, name, replacement)."""
    for module in FUNCTIONS:
        imported = sys.modules.get(module)
        if imported is not None:
            yield from _find_in_module(imported)
    stats, spatial = sys.modules.get("scipy.stats"), sys.modules.get("scipy.spatial")
    if stats is not None:
        yield from _find_in_stats(stats)
    for name in _CRASHING if spatial is not None else ():
        cls = getattr(spatial, name)
        yield cls, "__init__", _refusing(f"scipy.spatial.{name}", cls.__init__)


def replacement_of(function: Any) -> Any:
    """Return the replacement of a function of SciPy's; None if there is none."""
    if type(function) is np.ufunc:
        return next((new for table in ufuncs().values() for new in table.values() if new == function), None)
    if not str(getattr(function, "__module__", None) or "").startswith("scipy."):
        return None
    for module in FUNCTIONS:
        if module in sys.modules:
            found = next(
                (new for _, _, new in _find_in_module(sys.modules[module]) if new.__wrapped__ is function), None
            )
            if found is not None:
                return found
    return None


@cache
def _find_in_module(module: Any) -> list[tuple[Any, str, Any]]:
    """List the functions of one of SciPy's modules that run as library steps: (module, name, replacement)."""
    names = [n for n in FUNCTIONS[module.__name__].split() if hasattr(module, n)]
    return [(module, n, as_library_step(f"{module.__name__}.{n}", getattr(module, n))) for n in names]


def ufuncs() -> dict[Any, dict[str, Any]]:
    """Return the ufuncs of `scipy.special`, if it is imported, that take lists of traced arrays: by module and name."""
    special = sys.modules.get("scipy.special")
    return {} if special is None else {special: _find_ufuncs(special)}


@cache
def _find_ufuncs(module: Any) -> dict[str, Any]:
    return {name: new for name, new in replacements_in(module) if isinstance(new, np.ufunc)}


@cache
def _find_in_stats(stats: Any) -> list[tuple[Any, str, Any]]:
    """List the methods of scipy.stats' distributions that run as library steps: (class, name, replacement)."""
    found: list[tuple[Any, str, Any]] = []
    for path, names in METHODS.items():
        module, _, name = path.rpartition(".")
        cls = getattr(getattr(stats, module) if module else stats, name)
        found += [(cls, n, _method_as_library_step(n, getattr(cls, n))) for n in names.split()]
    return found
