"""Special values of unary operators and reductions: operands and expected results.

Symbols: `max`, `nor` and `sub` are the largest, the smallest normal and the smallest subnormal number of the format.
`~` is any finite number. `+-0` is a zero of either sign. `a|b` is a or b. `a(b)` is a, but b in float16, which computes
in float32 without overflow. Results of exact operators equal these numbers, others are within their accuracy of them.

Where libraries disagree, entries are those of PyTorch's formula on a GPU, and SciPy's for sums of exponentials.
"""

from __future__ import annotations

# Numbers after a name are the operator's parameters.
UNARY = """
x                 -inf   -max     -1   -nor   -sub     -0      0    sub    nor      1    max    inf    nan

negative           inf    max      1    nor    sub      0     -0   -sub   -nor     -1   -max   -inf    nan
absolute           inf    max      1    nor    sub      0      0    sub    nor      1    max    inf    nan
sign                -1     -1     -1     -1     -1    +-0    +-0      1      1      1      1      1    nan
square             inf    inf      1      0      0      0      0      0      0      1    inf    inf    nan
sqrt               nan    nan    nan    nan    nan     -0      0      ~      ~      1      ~    inf    nan
reciprocal          -0      ~     -1      ~   -inf   -inf    inf    inf      ~      1      ~      0    nan

exp                  0      0      ~      1      1      1      1      1      1      ~    inf    inf    nan
exp2                 0      0    0.5      1      1      1      1      1      1      2    inf    inf    nan
expm1               -1     -1      ~   -nor   -sub     -0      0    sub    nor      ~    inf    inf    nan
log                nan    nan    nan    nan    nan   -inf   -inf      ~      ~      0      ~    inf    nan
log2               nan    nan    nan    nan    nan   -inf   -inf      ~      ~      0      ~    inf    nan
log10              nan    nan    nan    nan    nan   -inf   -inf      ~      ~      0      ~    inf    nan
log1p              nan    nan   -inf   -nor   -sub     -0      0    sub    nor      ~      ~    inf    nan

sin                nan      ~      ~   -nor   -sub     -0      0    sub    nor      ~      ~    nan    nan
cos                nan      ~      ~      1      1      1      1      1      1      ~      ~    nan    nan
tan                nan      ~      ~   -nor   -sub     -0      0    sub    nor      ~      ~    nan    nan
arcsin             nan    nan  -pi/2   -nor   -sub     -0      0    sub    nor   pi/2    nan    nan    nan
arccos             nan    nan     pi   pi/2   pi/2   pi/2   pi/2   pi/2   pi/2      0    nan    nan    nan
arctan           -pi/2  -pi/2  -pi/4   -nor   -sub     -0      0    sub    nor   pi/4   pi/2   pi/2    nan
sinh              -inf   -inf      ~   -nor   -sub     -0      0    sub    nor      ~    inf    inf    nan
cosh               inf    inf      ~      1      1      1      1      1      1      ~    inf    inf    nan
tanh                -1     -1      ~   -nor   -sub     -0      0    sub    nor      ~      1      1    nan
arcsinh           -inf      ~      ~   -nor   -sub     -0      0    sub    nor      ~      ~    inf    nan
arccosh            nan    nan    nan    nan    nan    nan    nan    nan    nan      0      ~    inf    nan
arctanh            nan    nan   -inf   -nor   -sub     -0      0    sub    nor    inf    nan    nan    nan
erf                 -1     -1      ~      ~   -sub     -0      0    sub      ~      ~      1      1    nan

floor             -inf   -max     -1     -1     -1     -0      0      0      0      1    max    inf    nan
ceil              -inf   -max     -1     -0     -0     -0      0      1      1      1    max    inf    nan
rint              -inf   -max     -1     -0     -0     -0      0      0      0      1    max    inf    nan
trunc             -inf   -max     -1     -0     -0     -0      0      0      0      1    max    inf    nan
hardtanh(-0.75,1.25) -0.75  -0.75  -0.75   -nor   -sub     -0      0    sub    nor      1   1.25   1.25    nan
clip(-0.75,1.25) -0.75  -0.75  -0.75   -nor   -sub     -0      0    sub    nor      1   1.25   1.25    nan
finite_or_zero       0   -max     -1   -nor   -sub     -0      0    sub    nor      1    max      0      0

logical_not          0      0      0      0      0      1      1      0      0      0      0      0      0
isnan                0      0      0      0      0      0      0      0      0      0      0      0      1
isinf                1      0      0      0      0      0      0      0      0      0      0      1      0
isfinite             0      1      1      1      1      1      1      1      1      1      1      0      0

relu                 0      0      0      0      0    +-0      0    sub    nor      1    max    inf    nan
relu6                0      0      0      0      0    +-0      0    sub    nor      1      6      6    nan
leaky_relu(0.125) -inf      ~ -0.125      ~     -0     -0      0    sub    nor      1    max    inf    nan
leaky_relu(0)      nan     -0     -0     -0     -0     -0      0    sub    nor      1    max    inf    nan
leaky_relu(inf)   -inf   -inf   -inf   -inf   -inf    nan    nan    sub    nor      1    max    inf    nan
leaky_relu(nan)    nan    nan    nan    nan    nan    nan    nan    sub    nor      1    max    inf    nan
gelu               nan     -0      ~      ~      ~     -0      0      ~      ~      ~    max    inf    nan
gelu_tanh          nan     -0      ~      ~      ~     -0      0      ~      ~      ~    max    inf    nan
silu               nan     -0      ~      ~      ~     -0      0      ~      ~      ~    max    inf    nan
mish               nan     -0      ~      ~      ~     -0      0      ~      ~      ~    max    inf    nan
gelu_slope         nan    +-0      ~    0.5    0.5    0.5    0.5    0.5    0.5      ~      1    nan    nan
gelu_tanh_slope    nan    +-0      ~    0.5    0.5    0.5    0.5    0.5    0.5      ~      1    nan    nan
silu_slope         nan    +-0      ~    0.5    0.5    0.5    0.5    0.5    0.5      ~      1    nan    nan
hardswish          nan     -0      ~      ~      ~     -0      0      ~      ~      ~    max    inf    nan
sigmoid              0      0      ~    0.5    0.5    0.5    0.5    0.5    0.5      ~      1      1    nan
hardsigmoid          0      0      ~    0.5    0.5    0.5    0.5    0.5    0.5      ~      1      1    nan
log_sigmoid       -inf   -max      ~   -ln2   -ln2   -ln2   -ln2   -ln2   -ln2      ~    +-0    +-0    nan
softplus(1,20)       0      0      ~    ln2    ln2    ln2    ln2    ln2    ln2      ~    max    inf    nan
softplus(2,20)       0      0      ~  ln2/2  ln2/2  ln2/2  ln2/2  ln2/2  ln2/2      ~    max    inf    nan
elu(0.75)        -0.75  -0.75      ~      ~      ~     -0      0    sub    nor      1    max    inf    nan
celu(1.5)         -1.5   -1.5      ~      ~      ~     -0      0    sub    nor      1    max    inf    nan
selu             -selu  -selu      ~      ~      ~     -0      0      ~      ~      ~    inf    inf    nan
softsign           nan     -1   -0.5   -nor   -sub     -0      0    sub    nor    0.5      1    nan    nan
"""

# Single calls: operands | result.
CASES = """
where          0  nan    1  |     1
where          1  nan    1  |   nan
where          0    1   -0  |    -0
where        nan  inf    1  |   inf
where         -0    1 -inf  |  -inf
where        sub    2   -2  |   2|-2
hardtanh       1   -1  nan  |   nan
hardtanh       1  nan    2  |   nan
hardtanh     nan   -1    1  |   nan
hardtanh       0    2    1  |     1
clip           1   -1  nan  |   nan
clip           1  nan    2  |   nan
clip         nan   -1    1  |   nan
clip           0    2    1  |     1
clip         inf -inf  inf  |   inf
clip        -inf -max  max  |  -max
clip         max -inf    0  |     0
softplus    -inf    1   20  |     0
softplus     inf    1  inf  |   inf
softplus       1  inf   20  |     1
softplus      -1  inf   20  |     0
softplus       1    1  nan  |     ~
softplus     nan    1   20  |   nan
softplus       1  nan   20  |   nan
leaky_relu  -inf -inf       |   inf
leaky_relu  -max  max       |  -inf
leaky_relu   nan    1       |   nan
elu         -inf  inf       |  -inf
elu           -1    0       |    -0
elu           -1  nan       |   nan
elu            0  inf       |   nan
celu        -inf  inf       |   nan
celu          -1   -1       |     ~
celu           1    0       |     1
celu           0    0       |   nan
power          2   -1       |   0.5
power         -2    3       |    -8
power         -2    2       |     4
power         -2  0.5       |   nan
power         -0  0.5       |     0
power        sub    0       |     1
power       -inf    3       |  -inf
power       -inf    2       |   inf
power       -inf   -3       |    -0
power       -inf  0.5       |   inf
power        0.5 -inf       |   inf
power        0.5  inf       |     0
power        0.5  max       |     0
power        0.5 -max       |   inf
safe_multiply nor nor       | nan(0)
safe_multiply max nor       |     ~
safe_multiply max max       |   inf
safe_divide  nor  max       | nan(0)
safe_divide    0  max       |     0
safe_divide  max  nor       |   inf
divide       sub  max       |     0
multiply     sub  0.5       |     0
multiply     max    2       |   inf
add          max  max       |   inf
"""

# Cells of a row, and its reductions. `error`: raises as NumPy does.
REDUCED = """
cells            sum      prod  max  min      mean expsum moment2 logsumexp distances expdistances argmax argmin

-inf            -inf      -inf -inf -inf      -inf    nan     nan      -inf       nan          nan     0      0
inf              inf       inf  inf  inf       inf    nan     nan       inf       nan          nan     0      0
nan              nan       nan  nan  nan       nan    nan     nan       nan       nan          nan     0      0
-0               +-0        -0   -0   -0       +-0      1       0       +-0         0            0     0      0
3                  3         3    3    3         3      1       0         3         0            0     0      0
max              max       max  max  max       max      1       0       max         0            0     0      0
-max            -max      -max -max -max      -max      1       0      -max         0            0     0      0
sub              sub       sub  sub  sub       sub      1       0       sub         0            0     0      0

-inf,-inf,-inf  -inf      -inf -inf -inf      -inf    nan     nan      -inf       nan          nan     0      0
inf,inf,inf      inf       inf  inf  inf       inf    nan     nan       inf       nan          nan     0      0
-inf,1,2        -inf      -inf    2 -inf      -inf      ~     nan         ~      -inf          nan     2      0
1,2,inf          inf       inf  inf    1       inf    nan     nan       inf       nan          nan     2      0
1,inf,-inf       nan      -inf  inf -inf       nan    nan     nan       inf       nan          nan     1      2
nan,1,2          nan       nan  nan  nan       nan    nan     nan       nan       nan          nan     0      0
inf,-inf,nan     nan       nan  nan  nan       nan    nan     nan       nan       nan          nan     2      2
1,2,nan          nan       nan  nan  nan       nan    nan     nan       nan       nan          nan     2      2
0,1,inf          inf       nan  inf    0       inf    nan     nan       inf       nan          nan     2      0
0,1,-inf        -inf       nan    1 -inf      -inf      ~     nan         ~      -inf          nan     1      2
0,1,nan          nan       nan  nan  nan       nan    nan     nan       nan       nan          nan     2      2
0,0,0              0         0    0    0         0      3       0       ln3       +-0          +-0     0      0
-0,-0,-0         +-0        -0   -0   -0       +-0      3       0       ln3       +-0          +-0     0      0
-0,0,-0          +-0         0  +-0  +-0       +-0      3       0       ln3       +-0          +-0     0      0
1,1,1              3         1    1    1         1      3       0         ~       +-0          +-0     0      0
2,-2,0             0        -0    2   -2         0      ~       ~         ~        -6            ~     0      1
max,max,max      inf       inf  max  max  inf(max)      3   inf|0       max       +-0          +-0     0      0
-max,-max,-max  -inf      -inf -max -max -inf(-max)     3   inf|0      -max       +-0          +-0     0      0
max,-max,0         0    nan|-0  max -max         0      1 inf|nan       max      -inf      nan|+-0     0      1
max,1,1          max       max  max    1         ~      1     inf       max      -inf          +-0     0      1
-max,-inf,1     -inf       inf    1 -inf      -inf      1     nan         1      -inf          nan     2      1
max,inf,1        inf       inf  inf    1       inf    nan     nan       inf       nan          nan     1      2

empty              0         1 error error     nan  error     nan      -inf     error        error error  error
"""

# Cells of a row, its softmax and its log_softmax.
ROWS = """
cells              softmax          log_softmax

-inf               nan              nan
inf                nan              nan
nan                nan              nan
-0                 1                0
max                1                0
-inf,-inf,-inf     nan,nan,nan      nan,nan,nan
inf,inf,inf        nan,nan,nan      nan,nan,nan
-inf,1,1           0,0.5,0.5        -inf,-ln2,-ln2
1,2,inf            nan,nan,nan      -inf,-inf,nan
1,inf,-inf         nan,nan,nan      -inf,nan,-inf
nan,1,2            nan,nan,nan      nan,nan,nan
inf,-inf,nan       nan,nan,nan      nan,nan,nan
-0,0,-inf          0.5,0.5,0        -ln2,-ln2,-inf
0,0,0              ~,~,~            -ln3,-ln3,-ln3
max,max,-max       0.5,0.5,0        -ln2,-ln2,-inf
-max,-max,-inf     0.5,0.5,0        -ln2,-ln2,-inf
max,1,-inf         1,0,0            0,-max,-inf
max,inf,1          nan,nan,nan      -inf,nan,-inf
"""
