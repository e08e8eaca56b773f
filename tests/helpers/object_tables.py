"""The parts of `object_programs`: objects, what functions read of them, and changes."""

# `Mid` objects are what functions read most: they hold leaves, containers, records, arrays, and each other.
STATE = """
import abc, copy, dataclasses, functools, types, weakref
import numpy as np
import cupyfuse as cf

NOTHING = object()

class Meta(type):
    unit = 2.0
    def of_meta(cls, x): return x * cls.unit

class Leaf:
    rate = 1.5
    def __init__(self, k=1.0):
        self.k, self.w, self.name, self.mask, self.n, self.steps = k, np.full(3, k), "l", None, 2, 0
    def __call__(self, x): return x * self.w + self.k
    def __len__(self): return self.n
    def __add__(self, other): return self.k + (other.k if isinstance(other, Leaf) else other)
    __radd__ = __add__
    @property
    def twice(self): return self.k * 2
    @twice.setter
    def twice(self, value): self.k = value / 2
    def scaled(self, x, by=None): return x * (self.k if by is None else by)
    @classmethod
    def rated(cls, x): return x + cls.rate
    @staticmethod
    def moved(x): return x - Leaf.rate

class Deep(Leaf, metaclass=Meta):
    def __init__(self, k=1.0):
        super().__init__(k)
        self.__own = k / 2
    def __call__(self, x): return super().__call__(x) - self.__own
    @functools.cached_property
    def kept(self): return self.n * 0.5

class Slots:
    __slots__ = ("k", "w", "more", "__weakref__")
    def __init__(self, k=1.0): self.k, self.w = k, np.full(3, k)
    def __call__(self, x): return x + self.w * self.k + (self.more if hasattr(self, "more") else 0)
    def __eq__(self, other): return type(other) is Slots and self.k == other.k
    def __hash__(self): return hash(self.k)
    def scaled(self, x, by=None): return x / (self.k + (by or 0))

class Half(Slots):
    def __getattr__(self, name):
        if name in ("extra", "more"): return 0.25
        raise AttributeError(name)

GAIN, OFFSET, RATES = 1.5, 0.5, {"a": 0.25}

class Seeded:
    def __init__(self, k=1.0): self.k, self.rate = k * GAIN, RATES["a"]
    def __call__(self, x): return x * self.k
    def again(self, k): return type(self)(k)
    def same(self, k): return self.__class__(k)
    def own(self, k): return __class__(k)
    def reset(self, k): return object.__new__(Seeded).started(k)
    def started(self, k): return self.__init__(k) or self
    @classmethod
    def made(cls, k): return cls(k)

class Sown(Seeded):
    def __init__(self, k=1.0):
        super().__init__(k)
        self.k += OFFSET
    def __call__(self, x): return super().__call__(x) + self.rate

class Unit:
    def __init__(self, k): self.k = k
    def __call__(self, x): return x * self.k

class Check:
    def __set_name__(self, owner, name): self.place = "_" + name
    def __get__(self, obj, owner=None): return self if obj is None else obj._checked * 1.0
    def __set__(self, obj, value): obj._checked = value

class Mid:
    unit = Unit(0.75)
    checked = Check()
    def __init__(self, k=1.0):
        self.checked, self.k, self.w, self.one, self.two = k, k, np.full(3, k), Leaf(k), Slots(k)
        self.layers, self.table = [Leaf(k), Deep(k)], {"a": Leaf(k), "b": np.full(3, k)}
        self.pair = (Leaf(k), Half(k))
        self.record, self.space = Record(Leaf(k)), types.SimpleNamespace(a=Leaf(k), b=k)
        self.parent, self.mode, self.act = self, "sum", self.one.scaled
        self.part = functools.partial(self.one.scaled, by=k)
        self.shared, self.flag, self.count, self.log = self.w, True, 3, [1, 2]
        self.seed, self.kind = Sown(k), Seeded
        self.link, self.gen = weakref.ref(self), (i for i in range(3))
    def __getitem__(self, i): return self.layers[i]
    def __iter__(self): return iter(self.layers)
    def __contains__(self, item): return any(item is l for l in self.layers)
    def run(self, x):
        for layer in self.layers: x = layer(x) * 0.5
        return x if self.flag else x + self.k
    @cf.fuse
    def inner(self, x): return self.one(x) + self.w
    def outer(self, x): return self.inner(x) * self.k

@dataclasses.dataclass
class Record:
    leaf: object
    b: object = 2.0
    def use(self, x): return self.leaf(x) * self.b

mid, other = Mid(), Mid(2.0)
seeded, sown = Seeded(0.75), Sown(1.25)
leaf, slots, half, deep = Leaf(1.25), Slots(1.5), Half(0.5), Deep(1.75)
held = [mid, leaf]
"""

# Separated by bars. {m} is an expression of a Mid; the others find their own objects.
READS = """
{m}.k | {m}.w | {m}.one.k | {m}.one.w | {m}.two.k | {m}.two.w | {m}.layers[0].k | {m}.layers[-1].w |
len({m}.layers) | {m}.table['a'].k | {m}.table['b'] | {m}.pair[0].w | {m}.pair[1].k | {m}.pair[1].extra |
{m}.record.leaf.k | {m}.record.b | {m}.space.a.w | {m}.space.b | {m}.parent.k | {m}.parent.parent.one.k |
len({m}.one) | ({m}.one + {m}.layers[0]) | sum({m}.layers) | {m}.one.twice | {m}.checked | {m}.unit.k |
getattr({m}, 'z', 0.5) | getattr({m}.one, 'w') | getattr({m}.one, 'mask', None) is None | {m}.shared |
hasattr({m}.one, 'z') * 1.0 | hasattr({m}.two, 'more') * 2 | ({m}.mode == 'sum') * 1.5 | {m}.count |
isinstance({m}.layers[-1], Deep) * 0.5 | ({m}.one is {m}.layers[0]) * 1.0 | ({m}.w is {m}.shared) * 1.0 |
({m}.parent is {m}) * 0.5 | ({m}.two == slots) * 0.5 | ({m}.one in {m}) * 2 | [l.k for l in {m}][0] | {m}[0].k |
{m}.layers[-1].n | (1.0 if {m}.one.mask is None else {m}.one.mask) | deep.kept | deep.n |
(leaf.k if {m}.flag else slots.k) | leaf.rate | Leaf.rate | Deep.unit | leaf.twice | slots.w | half.extra |
held[0].k | held[1].w | len(held) | (half.more + half.k) | ({m}.record.leaf is {m}.one) * 1.0 |
({m}.act.__self__ is {m}.one) * 1.0 | type({m}.one).rate | ({m} is other) * 1.0 | getattr({m}, 'mode', '') != 'x' |
(NOTHING if {m}.flag else None) is NOTHING | {m}.__class__.unit.k | bool({m}.log) * 1.0 | (len({m}.log) > 2) |
({m}.one.name == 'l') * 1.0 | (lambda o: o.k)({m}.one) | max(l.n for l in {m}.layers) |
{m}.seed.k | {m}.seed.again(0.5).k | {m}.seed.made(0.5).k | {m}.seed.same(2.0).k | {m}.seed.own(2.0).rate |
{m}.kind(0.75).k | Seeded(0.5).k | Sown(1.5).k | {m}.kind.made(0.5).k | seeded.k | sown.rate | seeded.reset(0.5).k |
[Sown, Seeded][0](0.5).rate | getattr({m}.seed, '__class__')(0.5).k | functools.partial({m}.kind, 0.5)().k
"""
STEPS = """
x + {0} | x * {0} | np.exp(-x * 0.1) + {0} | np.where(x > {0}, x, {1}) | {m}.run(x) | {m}.inner(x) + {0} |
{m}.outer(x) | {m}.one(x) | {m}.two(x) - {0} | {m}.act(x) | {m}.part(x) + {0} | {m}.record.use(x) |
{m}.layers[-1](x) | {m}.pair[1](x) | {m}.one.rated(x) | Leaf.moved(x) + {0} | type(deep).of_meta(x) |
x + {0} if {1} is not None else x | leaf(x) | slots(x) + half(x) | {m}.one.scaled(x, {0}) | {m}.pair[0].scaled(x) |
functools.reduce(lambda p, l: l(p), {m}.layers, x) | {m}.unit(x) | sum(l.scaled(x) for l in {m}.layers) |
{m}.seed(x) | {m}.seed(x) + {0} | seeded(x) * {0} | sown(x) | {m}.seed.again(0.5)(x) | {m}.kind(0.5)(x) |
{m}.seed.made(0.75)(x)
"""
ARGUMENTS = (
    *("mid", "other", "mid.parent", "copy.copy(mid)", "Mid(1.5)", "held[0]", "[mid, other]", "{'m': mid, 'l': leaf}"),
    *(
        "(mid, 2.0)",
        "Record(mid)",
        "types.SimpleNamespace(m=mid)",
        "mid.run",
        "mid.inner",
        "functools.partial(Mid.run, mid)",
    ),
)
AS_MID = {
    "[": "{0}[0]",
    "{": "{0}['m']",
    "(": "{0}[0]",
    "Record": "{0}.leaf",
    "types": "{0}.m",
    "mid.run": "{0}.__self__",
    "mid.inner": "{0}.__self__",
    "functools": "{0}.args[0]",
}
OBJECTS = ("leaf", "deep", "mid.one", "mid.layers[0]", "mid.layers[-1]", "mid.table['a']", "mid.pair[0]")
OBJECTS += ("mid.record.leaf", "mid.space.a", "other.one", "mid.one", "slots", "half", "mid.two", "mid.pair[1]")
CHANGES = """
{o}.k = {0} | {o}.w = np.full(3, {0}) | {o}.w[1] = {0} | {o}.more = {0} | {o}.w = np.full((2, 3), {0}) |
{l}.mask = {0} | {l}.mask = None | {l}.n = {2} | {l}.steps += 1 | {l}.name = 'other' | {l}.z = {0} |
{l}.twice = {0} | {l}.w = {o}.w | {l}.rate = {0} | {l}.k = {2} | {l}.k = np.float32({0}) | {l}.k = np.full(3, {0}) |
{l}.__dict__.pop('z', None) | {l}.__dict__.pop('rate', None) | {l}.scaled = lambda x, by=None: x - {0} |
{l}.__dict__.pop('scaled', None) | {l}.__class__ = Deep if hasattr({l}, '_Deep__own') else Leaf |
{l}._Deep__own = {0} | mid.k = {0} | mid.w = np.full(3, {0}) | mid.w[0] = {0} | mid.w = mid.one.w |
mid.one.w = mid.w | mid.one = {l} | mid.one = copy.copy(mid.one) | mid.one = copy.deepcopy(mid.one) |
mid.two = copy.copy(mid.two) | mid.one = Deep({0}) | mid.two = {l} | mid.two = Slots({0}) | mid.two = half |
mid.layers.append(Leaf({0})) | mid.layers.append({l}) | mid.layers.pop() if len(mid.layers) > 1 else None |
mid.layers[0] = {o} | mid.layers = [mid.one, mid.one] | mid.layers = list(mid.layers) | mid.layers.reverse() |
mid.table['a'] = {l} | mid.table['c'] = {0} | mid.table['b'][:] = {0} | mid.pair = (mid.one, half) |
mid.pair = ({l}, Half({0})) | mid.record = Record({l}, {0}) | mid.record.b = {0} | mid.record.leaf = mid.one |
mid.space.a = {l} | mid.space.b = {0} | mid.parent = other | mid.parent = mid | other.parent = mid |
mid.mode = 'other' | mid.mode = 'sum' | mid.act = {o}.scaled | mid.act = leaf |
mid.part = functools.partial({o}.scaled, by={0}) | mid.shared = mid.w | mid.shared = mid.w.copy() |
mid.flag = not mid.flag | mid.count = {2} | mid.log.append({0}) | mid.z = {0} | mid.__dict__.pop('z', None) |
mid.checked = {0} | mid.run = other.run | mid.__dict__.pop('run', None) | mid, other = other, mid | mid = Mid({0}) |
leaf = {l} | slots = Slots({0}) | slots.more = {0} | held[0] = other | held[1] = {l} | held.append(leaf) |
Leaf.rate = {0} | Leaf.scaled = lambda self, x, by=None: x + self.k | Leaf.__len__ = lambda self: 5 |
Leaf.__call__ = lambda self, x: x - self.w | Deep.rate = {0} | Meta.unit = {0} | Mid.unit = Unit({0}) |
Mid.unit.k = {0} | Mid.run = lambda self, x: x + self.one.k | Slots.__eq__ = lambda self, other: self is other |
Half.extra = {0} | Leaf.twice = property(lambda self: self.n) | half = Half({0}) | half.more = {0} | del half.more |
del slots.more | Mid.inner = cf.fuse(lambda self, x: x * self.one.k) | deep.__dict__.pop('kept', None) |
deep.n = {2} | mid.link = None | mid.pair[1].more = {0} | mid.layers.insert(0, slots) |
mid.one, mid.two = mid.two, mid.one | mid.gen = None |
GAIN = {0} | GAIN = {1} | OFFSET = {0} | RATES['a'] = {0} | RATES = {{'a': {0}}} | mid.seed = seeded |
mid.seed = Sown({0}) | mid.kind = Sown | mid.kind = Seeded | seeded = Seeded({0}) | seeded.__class__ = Sown |
Seeded.__init__ = lambda self, k=1.0: self.__dict__.update(k=k + GAIN, rate=OFFSET) |
Sown.again = lambda self, k: Seeded(k) | Sown.made = classmethod(lambda cls, k: cls(k + 1))
"""
