"""The benchmark of matrix products without a GPU: families of data, errors by hand, verdicts and their report."""

import numpy as np
import pytest
from benchmark_lab import ENVIRONMENT, timed

from benchmarks import families, gemm
from benchmarks.__main__ import markdown
from benchmarks.gemm import BY_ELEMENT, BY_NORM, has_one_sign, margin
from benchmarks.lab import WRONG, measure_errors, run
from benchmarks.report import Case, Report, Result
from cupyfuse.settings import PRECISIONS

SHAPE = (128, 1024, 192)


def drawn(name, shape=SHAPE):
    return (operand.astype(np.float64) for operand in families.draw(name, shape, 0))


@pytest.mark.parametrize("name", families.FAMILIES)
@pytest.mark.parametrize("shape", [(5, 1, 4), (3, 2, 7), (4, 255, 3), SHAPE])
def test_families_are_float32_operands_that_depend_on_the_seed_alone(name, shape):
    m, k, n = shape
    x, weight = families.draw(name, shape, 0)
    assert x.dtype == weight.dtype == np.float32
    assert (x.shape, weight.shape) == ((m, k), (n, k))
    assert np.isfinite(x).all() and np.isfinite(weight).all()
    assert x.flags.c_contiguous and weight.flags.c_contiguous
    again, other = families.draw(name, shape, 0), families.draw(name, shape, 1)
    assert np.array_equal(x, again[0]) and np.array_equal(weight, again[1])
    if shape == SHAPE:
        assert not np.array_equal(x, other[0]) and not np.array_equal(weight, other[1])
    assert families.FAMILIES[name].__doc__.endswith(".")


def test_families_of_plain_distributions():
    for operand in drawn("gaussian"):
        assert abs(operand.mean()) < 0.02 and abs(operand.std() - 1) < 0.02
    for operand in drawn("positive"):
        assert operand.min() >= 0 and operand.max() < 1 and abs(operand.mean() - 0.5) < 0.01
    for operand in drawn("heavy-tailed"):
        beyond = [(abs(operand) > quantile).mean() for quantile in (0.8165, 4.3027, 31.599)]  # of tables of Student's t
        assert beyond == pytest.approx([0.5, 0.05, 0.001], rel=0.25)
    x, weight = drawn("head")
    assert x.min() >= 0 and x.max() < 1
    assert abs(weight).max() <= 1 / 32 and abs(weight.mean()) < 1e-3 and weight.min() < 0 < weight.max()


def test_outliers_are_where_they_are_said_to_be():
    for operand in drawn("outlier-rows"):
        scale = operand.std(axis=1)
        assert (scale > 5000).sum() == len(operand) // 64 and (scale < 2).sum() == len(operand) - len(operand) // 64
    x, weight = ((operand.std(axis=0) > 5000) for operand in drawn("outlier-columns"))
    assert x.sum() == weight.sum() == SHAPE[1] // 64 and not (x & weight).any()


def test_cancelling_sums_grow_and_end_near_zero():
    for depth in (1024, 1023):
        x, weight = drawn("cancelling", (128, depth, 192))
        sizes = abs(x) @ abs(weight).T
        half = depth // 2
        assert np.linalg.norm(x @ weight.T) < 2e-3 * np.linalg.norm(sizes)
        assert np.linalg.norm(x[:, :half] @ weight[:, :half].T) == pytest.approx(np.linalg.norm(sizes) / 2, rel=0.02)


def toward_zero(exact):
    rounded = exact.astype(np.float32)
    return np.where(abs(rounded) > abs(exact), np.nextafter(rounded, np.float32(0)), rounded)


def test_truncated_sums_lose_a_unit_in_every_step():
    def running(x, weight, rounding):
        """What a running sum, rounded to float32, loses in a step, in units in the last place; its relative error."""
        terms = x * weight
        assert np.array_equal(terms, terms.astype(np.float32))
        total, lost = np.float32(0), []
        for term in terms:
            exact = np.float64(total) + term
            total = rounding(exact)
            lost.append((exact - total) / np.spacing(total))
        return np.mean(lost[64:]), abs(total / terms.sum() - 1)

    x, weight = drawn("truncating", (128, 4096, 192))
    assert (x > 0).all() and (weight > 0).all()
    exact = x[0] % 2.0**-13 == 0  # the others are 1 - 2**-24, times a power of two
    assert 0.4 < exact.mean() < 0.6
    for operand in (x[:, exact], weight):
        assert np.array_equal(operand, operand.astype(np.float16))
    for i, j in ((0, 0), (17, 101)):
        zero_loss, zero_error = running(x[i], weight[j], toward_zero)
        nearest_loss, nearest_error = running(x[i], weight[j], np.float32)
        assert zero_loss > 0.9 and abs(nearest_loss) < 0.05
        assert zero_error > 100 * nearest_error and nearest_error < 1e-6
    terms = np.random.default_rng(0).random(4096, np.float32).astype(np.float64)
    assert zero_error > 1.5 * running(terms, np.ones(4096), toward_zero)[1]


@pytest.mark.parametrize("shape", [SHAPE, (8, 96, 130), (4, 1, 7)])
def test_orthogonal_weights_are_so(shape):
    _, weight = drawn("orthogonal", shape)
    small = weight @ weight.T if shape[2] <= shape[1] else weight.T @ weight
    assert abs(small - np.eye(len(small))).max() < 1e-6


def test_low_rank_weights_are_so():
    _, weight = drawn("low-rank")
    values = np.linalg.svd(weight, compute_uv=False)
    assert values[families.RANK - 1] > 5 * values[families.RANK] > 0


def test_rows_of_one_element_choose_columns():
    x, weight = drawn("one-hot")
    assert (x.max(axis=1) == 1).all() and (np.count_nonzero(x, axis=1) == 1).all()
    assert np.array_equal(x @ weight.T, weight[:, x.argmax(axis=1)].T)


def test_errors_of_a_product_by_hand(lab):
    """1 * 3 + 2 * -1 is 1, of size 5; 1.5 errs by half of it and a tenth of its size."""
    x, weight = np.array([[1, 2]], np.float32), np.array([[3, -1]], np.float32)
    rivals, facts = gemm.product(lab, x, weight)
    assert facts == {"reference": 2.0**-53, "cancellation": 5.0}
    lab.cupy.matmul = lambda x, weight: np.array([[1.5]], np.float32)
    wrong = {gemm.BASE: rivals[gemm.BASE]}
    assert measure_errors(wrong[gemm.BASE]()) == (0.5, pytest.approx(0.1))
    case = run(lab, Case("g", "c", (1, 2, 1), "float32"), wrong, ("gpu_evicted",), 1e-9)
    assert case.results[0].failure == "wrong result: max error 0.1"
    assert (case.results[0].error, case.results[0].max_error) == (0.5, pytest.approx(0.1))


def test_large_products_are_compared_in_some_rows(lab, monkeypatch):
    monkeypatch.setattr(gemm, "_CHECKED", 3 * 4 * 5)
    x, weight = (np.ones(shape, np.float32) for shape in ((10, 4), (5, 4)))
    rival = gemm.product(lab, x, weight)[0][gemm.BASE]()
    assert rival.expected[0].shape == rival.sizes[0].shape == (3, 5)
    assert measure_errors(rival) == (0.0, 0.0)


def test_a_product_that_is_rounded_too_coarsely_is_wrong():
    assert (
        gemm.error_limit("highest", 1)
        < 2.0**-20
        < gemm.error_limit("high", 1)
        < gemm.error_limit("medium", 1)
        < 2.0**-5
    )
    assert set(gemm._OPERANDS) == set(WRONG) == set(PRECISIONS)


def product_case(name, cancellation, shape=(4, 8, 16), group="Families of data", **errors):
    """Each error is a pair: by norms, and the largest. Times are 1, 2, ... microseconds."""
    case = Case(group, name, shape, "float32", facts={"reference": 1e-15, "cancellation": cancellation})
    for place, (rival, (norm, largest)) in enumerate(errors.items(), 1):
        known = {
            "bound": gemm.product_name("highest", True),
            "fused": gemm.product_name("highest", False),
            "base": gemm.BASE,
        }
        case.results.append(timed(known.get(rival, rival), norm, gpu_evicted=float(place)))
        case.results[-1].max_error = largest
    return case


def test_verdicts_follow_from_the_errors():
    good = product_case("gaussian", 9.0, bound=(1e-7, 1e-8), fused=(2e-7, 2e-8), base=(2e-7, 3e-8))
    assert BY_ELEMENT.check(good).found == {gemm.BASE: pytest.approx(2 / 3)}
    assert (BY_ELEMENT.check(good).holds, BY_NORM.check(good).holds, has_one_sign(good)) == (True, True, False)
    bad = product_case("positive", 1.0, bound=(1e-7, 5e-8), fused=(3e-7, 1e-8), base=(2e-7, 3e-8))
    assert (BY_ELEMENT.check(bad).holds, BY_NORM.check(bad).holds, has_one_sign(bad)) == (False, False, True)
    bad.results[0].failure = "out of memory"
    assert (BY_ELEMENT.check(bad).holds, BY_NORM.check(bad).found) == (None, {gemm.BASE: None})
    assert margin(Report("gemm", ENVIRONMENT, {}, cases=[good])) == pytest.approx(1e-8 / 1e-15)


def products_report():
    cases = [
        product_case("gaussian", 9.0, bound=(1e-7, 1e-8), fused=(2e-7, 2e-8), base=(2e-7, 3e-8)),
        product_case("positive", 1.0, bound=(3e-7, 1e-8), fused=(3e-7, 1e-8), base=(2e-7, 3e-8)),
        *(
            product_case(f"K = {depth}", 2.0, (4, depth, 16), "Over K: gaussian", bound=(1e-7, 0.0), base=(2e-7, 3e-8))
            for depth in (1, 255)
        ),
    ]
    cases[-1].results[-1].failure = "out of memory"
    cases[0].results.append(Result("torch TF32", failure="not installed"))
    return Report("gemm", ENVIRONMENT, {"quick": True}, cases=cases)


def test_the_report_of_products_begins_with_verdicts():
    text = markdown(products_report())
    assert "- By max error it is no larger in 2 of 2 cases; 2 not measured." in text
    assert "- By Frobenius norms it is no larger in 1 of 1 cases with terms of both signs; 2 not measured." in text
    assert (
        "- By Frobenius norms it is no larger in 0 of 1 cases with terms of one sign, for which nothing is promised."
        in text
    )
    assert "| gaussian | 2.0e-08 | 3.0e-08 | 0.67 | yes | 2.0e-07 | 2.0e-07 | 1.00 | yes |" in text
    assert "| positive | 1.0e-08 | 3.0e-08 | 0.33 | yes | 3.0e-07 | 2.0e-07 | 1.50 | no (one sign) |" in text
    assert "| gaussian | 0.33 | 0.67 | – | – |" in text  # times 1 and 2 over 3 microseconds
    assert "| cupyfuse highest, bound | 1.0e-07 | 1.0e-08 | 1.00 | 3.00 |" in text
    assert "- torch TF32: not installed" in text
    assert "4 x K x 16" in text and "4 x 8 x 16" in text
    assert "| 255 | 0.0e+00 | [1] |" in text and text.count("\n1. out of memory") == 1
    assert "is 10,000,000 times that or more" in text  # 1e-8 over 1e-15
