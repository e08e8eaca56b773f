"""Emission: write a step of a plan as a short CUDA struct, which a template of `kernels_cu/` runs.

The struct (`Program`) says what to compute for an element and for a row, and knows nothing of threads; the templates
know nothing of operators. Everything here is text: neither a GPU nor CuPy is needed.
"""

from __future__ import annotations

from collections import ChainMap
from functools import cached_property, partial

from ..dtypes import ITEMSIZE
from ..ir.graph import Node
from .config import Config
from .expressions import Body, Scope, function_text, indented, rounded_in_pairs, struct_text
from .held import held_columns, held_rows, take_functions, tile_functions
from .kernel import CONDITION, Kernel, translation_unit
from .outlined import outlined
from .program import ANY, COLUMN, FULL, SCALAR, Accumulator, Parameter, Program, c_type, stored_type
from .repair import repair_function
from .shared_rows import held_bytes
from .totals import read_totals, totals_struct


def emit(program: Program, config: Config, merge: bool = False, conditional: bool = False) -> Kernel:
    """Emit the kernel of a row or column step for one configuration.

    Parameters
    ----------
    program : Program
    config : Config
    merge : bool
        Emit the kernel that merges the totals of shares.
    conditional : bool
        Emit a kernel that returns at once where the flag is 0.
    """
    streamed = config.template in ("row_stream", "row_shares", "row_shared")
    held = config.packs > 0
    writer = Writer(
        program,
        streamed,
        conditional,
        config.packed,
        config.shifted,
        config.apart,
        shared=held,
        merges=config.merges,
        in_lanes=config.template == "row_lanes",
        columns=config.columns,
        evict_last=config.evict_last,
    )
    entry, call = config.entry(merge)
    struct = f"// {program.step.kind}: {', '.join(program.step.fused)}\n{writer.emit_struct()}"
    threads, blocks = (config.merge_threads, 1) if merge else (config.threads, config.blocks)
    source = translation_unit(
        config.template, struct, entry, f"{call}(p)", threads, blocks, conditional, config.cluster
    )
    elements = config.threads // config.rows * config.packs * config.vec
    shared = held_bytes(program, elements, config.rows, config.columns) if held else 0
    return Kernel(entry, source, tuple(program.parameters), config, shared=shared, cluster=config.cluster)


class Writer:
    """Writes the struct of one program, whose members `kernels_cu/row_block.cu` describes.

    Parameters
    ----------
    program : Program
    streamed : bool
        Whether each stage reads the row again, and so recomputes what it needs of earlier stages.
    conditional : bool
        Whether the struct ends with a flag, see `translation_unit`.
    packed : bool
        Whether each stage computes what it needs from the inputs of all, which stay in registers as they were loaded.
    shifted : bool
        Whether rows may begin between two packs.
    apart : bool
        Whether rows that are read may begin elsewhere in a pack than those that are written.
    shared : bool
        Whether rows are held in shared memory as they were loaded.
    merges : bool
        Whether a second kernel merges the totals that blocks leave.
    in_lanes : bool
        Whether the lanes of a warp have rows in registers: those that hold values know the maximum of a row before
        they add up what is relative to it.
    columns : bool
        Whether values of columns are held in shared memory from row to row.
    evict_last : bool
        Whether the L2 cache evicts rows that are read after those that are written.

    Attributes
    ----------
    outlines : bool
        Whether elements are recomputed as written by a function that is not inlined.
    """

    outlines = True

    def __init__(
        self,
        program: Program,
        streamed: bool,
        conditional: bool,
        packed: bool = False,
        shifted: bool = False,
        apart: bool = False,
        shared: bool = False,
        merges: bool = False,
        in_lanes: bool = False,
        columns: bool = False,
        evict_last: bool = False,
    ):
        self.program = program
        self.merges = merges
        self.streamed = streamed or packed
        self.packed = packed
        self.shifted = shifted
        self.apart = apart
        self.shared = shared
        self.in_lanes = in_lanes
        self.columns = columns
        self.evict_last = evict_last
        self.one_tile = packed or in_lanes  # of all stages
        self.conditional = conditional
        self.repairs: dict[str, str] = {}  # repair functions by name
        self.row_fields: dict[str, str] = {}  # C types of the Row's fields, by name
        self.element_fields: dict[str, str] = {}  # likewise of the Element's
        self.held: dict[Node, str] = {}  # values of earlier stages, by the fields of the Element that hold them
        self.terms: dict[Node, str | None] = {}  # those that accumulators add up; see totals_struct
        self.in_place: dict[Node, Node] = {}  # terms by the values whose fields they take over
        self.exact_stages: set[int] = set()  # stages with guards, which may have to be recomputed as written
        # Stages after which all threads need the per-row values: all but the last, and those that repair together.
        self.shared_finish = set(range(program.stages - 1))

    def declare_members(self) -> list[str]:
        """Declare the members that the host fills in, eight bytes each, in the order of `KernelArguments.members`."""
        declarations = []
        for p in self.program.parameters:
            if p.is_number:
                declarations.append(f"double {p.name};")
                continue
            const = "" if p.written else "const "
            pointer = f"{const}{stored_type(p.dtype)}* {p.name};"
            if p.has_rows:
                pointer += f" i64 {p.name}_rows;"
            if p.has_cols:
                pointer += f" i64 {p.name}_cols;"
            declarations.append(pointer)
        declarations.append("i64 rows; i64 cols;")
        if self.merges:
            declarations.append("struct Totals0; Totals0* partial; i64 shares;")
        if self.conditional:
            declarations.append(CONDITION)
        return declarations

    def emit_struct(self) -> str:
        """Emit the struct `Program` with all its types and functions."""
        stages = range(self.program.stages)
        begin = self.emit_begin()
        bodies = [self.emit_stage(s) for s in stages]
        finishes = [self.emit_column_finish() if self.program.by_columns else self.emit_finish(s) for s in stages]
        commit = self.emit_commit()
        reducing = " || ".join(f"stage == {s}" for s in stages if self.program.reductions(s)) or "stage < 0"
        largest = ", ".join(f"sizeof(Totals{s})" for s in stages)
        shared = " || ".join(f"stage == {s}" for s in stages if s in self.shared_finish) or "stage < 0"
        exact = " || ".join(f"stage == {s}" for s in sorted(self.exact_stages)) or "stage < 0"
        column_bytes = sum(ITEMSIZE[p.dtype] for p in self.program.loaded.values() if p.extent == COLUMN)
        sections = [
            "\n".join(self.declare_members()),
            f"static constexpr int stages = {self.program.stages};\n"
            f"static constexpr bool packed = {str(self.packed).lower()}, shifted = {str(self.shifted).lower()}, "
            f"apart = {str(self.apart).lower()}, one_tile = {str(self.one_tile).lower()};\n"
            f"static constexpr int column_bytes = {column_bytes};  // of an element\n"
            f"__host__ __device__ static constexpr bool reduces(int stage) {{ return {reducing}; }}\n"
            f"__host__ __device__ static constexpr bool has_exact(int stage) {{ return {exact}; }}\n"
            f"__host__ __device__ static constexpr bool shared_finish(int stage) {{ return {shared}; }}",
            struct_text("Row", self.row_fields),
            struct_text("Element", self.element_fields),
            *(totals_struct(s, self.program.accumulators(s), self.read_field, self.terms) for s in stages),
            f"static constexpr int slot = (largest_of({largest}) + 7) / 8 * 8;",  # a multiple of any alignment
            begin,
            self.emit_misaligned(),
            held_rows(self.program) if self.shared else "",
            held_columns(self.program, self.columns, self.shifted) if self.shared else "",
            *bodies,
            *self.repairs.values(),
            *(f for f in finishes if f),
            commit,
        ]
        return "struct Program {\n" + indented("\n\n".join(s for s in sections if s)) + "\n};"

    def emit_misaligned(self) -> str:
        """Emit `misaligned`: how many elements of a row are before its first pack, in all arrays or those written."""
        if not self.shifted:
            return ""
        full = [p for p in self.program.parameters if p.extent == FULL]
        array = next((p for p in full if p.written), full[0])
        index = f"reinterpret_cast<u64>({array.name}) / sizeof({stored_type(array.dtype)}) + row * {array.name}_rows"
        head = "template <int V>\n__device__ int misaligned(i64 row) const"
        return f"{head} {{ return static_cast<int>(-({index}) & (V - 1)); }}"

    def read_field(self, node: Node, element: str = "e") -> str:
        """Return the field of an Element that holds a value; constants are literals."""
        if node.op == "const":
            return Scope(self.program).constant(node, "float32")
        return f"{element}.{self.program.names[self.in_place.get(node, node)]}"

    def element_field(self, node: Node) -> str:
        """Return the field of the Element that holds a value, after declaring it."""
        self.element_fields[self.program.names[node]] = c_type(node.dtype)
        return f"e.{self.program.names[node]}"

    def row_scope(self) -> Scope:
        """Return a new scope in which per-row and scalar values are fields of the Row."""
        return Scope(self.program, ChainMap(self.row_expressions)).copy()

    @cached_property
    def row_expressions(self) -> dict[Node, str]:
        """The fields of the Row that hold per-row and scalar values."""
        expressions = {}
        for node in (*self.program.loaded, *self.program.step.nodes):
            along_row = self.program.extent(node) in (FULL, COLUMN)
            any_extent = node in self.program.loaded and self.program.loaded[node].extent == ANY
            reduced_columns = self.program.by_columns and self.program.stage.get(node, -1) >= 0
            if not (along_row or any_extent or reduced_columns):
                expressions[node] = f"r.{self.program.names[node]}"
        return expressions

    def emit_begin(self) -> str:
        """Emit `begin`: the loads of per-row and scalar inputs, and the values that depend on them alone."""
        program = self.program
        body = Body(self.row_scope())
        body.repair = lambda node: self.emit_repair(node, "Solo()")
        for node, parameter in program.loaded.items():
            if program.extent(node) in (FULL, COLUMN) or parameter.extent == ANY:
                continue
            name = program.names[node]
            self.row_fields[name] = c_type(parameter.dtype)
            body.line(f"r.{name} = {body.scope.element(node, 'row', '0')};")
            self.emit_reciprocal(body, node)
        for node in program.step.nodes:
            if program.stage[node] < 0 and program.extent(node) not in (FULL, COLUMN):
                self.emit_row_value(body, node)
        return function_text("void begin(i64 row, Row& r) const", body)

    def emit_row_value(self, body: Body, node: Node) -> None:
        """Compute a per-row or scalar value into a field of the Row."""
        name = self.program.names[node]
        self.row_fields[name] = c_type(node.dtype)
        body.assign(node, f"r.{name}", "row", "0")
        self.emit_reciprocal(body, node)

    def emit_reciprocal(self, body: Body, node: Node) -> None:
        """Store the reciprocal of a per-row value that divides elements beside it."""
        if node in self.program.divisors:
            name = self.program.names[node]
            self.row_fields[f"{name}_reciprocal"] = c_type(node.dtype)
            body.line(f"r.{name}_reciprocal = reciprocal_of(r.{name});")

    def emit_stage(self, stage: int) -> str:
        """Emit the functions of one stage on elements: load, element, exact_element, store."""
        program = self.program
        operands = [o for o in program.reductions(stage) if o.op != "const"]
        outputs = program.full_outputs.get(stage, [])

        def write_body(optimistic: bool) -> Body:
            scope = self.row_scope()
            if not self.streamed:
                scope = Scope(program, scope.expressions.new_child(self.held)).copy()
            body = Body(scope, tile=True, optimistic=optimistic)
            body.repair = lambda node: self.emit_repair(node, "Solo()")
            for node in [*operands, *outputs]:
                body.value(node)
            kept = dict.fromkeys([*operands, *self.needed_later(stage, body)])
            for node in kept:
                if body.value(node) != self.element_field(node):
                    body.line(f"{self.element_field(node)} = {body.value(node)};")
            for node in outputs:
                parameter = program.outputs[node]
                value = (body.unrounded if rounded_in_pairs(parameter) else body.stored)(node, parameter.dtype)
                body.line(f"out.{parameter.name}.v[j] = {value};")
            body.kept = [] if self.streamed else list(kept)
            return body

        fast = write_body(optimistic=True)
        exact = None
        if fast.checks or fast.row_checks:
            self.exact_stages.add(stage)
            exact = write_body(optimistic=False)
        self.held.update((n, self.read_field(n)) for n in (exact or fast).kept)
        if self.in_lanes and not self.streamed:
            for accumulator in program.accumulators(stage):
                if accumulator.term is not None:
                    self.hold_term(accumulator, accumulator.term, stage)
        return self._emit_element_functions(stage, fast, exact, [program.outputs[n] for n in outputs])

    def hold_term(self, accumulator: Accumulator, term: Node, stage: int) -> None:
        """Hold the terms of a sum of exponentials in Elements: in the operand's field, if no later stage reads that."""
        operand, distance, program = accumulator.operand, term.inputs[0], self.program
        of_shares = any(n.inputs[0] is term for n in program.shares)
        self.terms[term] = None if of_shares else self.term_of_distance(term)
        only_readers = {operand: distance, distance: term}
        later = [n for n in program.step.nodes if program.stage[n] > stage]
        is_read = any(i in only_readers and only_readers[i] is not n for n in later for i in n.inputs)
        added = [a for a in program.accumulators(stage) if a.operand is operand]
        if operand in self.held and not is_read and len(added) == 1 and operand not in program.step.outputs:
            self.in_place[term] = operand
            self.held[term] = self.read_field(term)
            del self.held[operand]
        else:
            self.held[term] = self.element_field(term)

    def term_of_distance(self, term: Node) -> str:
        """Return the expression of a term exp(x - m), given the variable `distance`, which holds x - m."""
        body = Body(self.row_scope())
        body.scope.expressions[term.inputs[0]] = "distance"
        return body.expression(term)

    def needed_later(self, stage: int, body: Body) -> list[Node]:
        """Return the full-size values computed in a stage's body that later stages read: the Element holds them."""
        program = self.program
        if self.streamed:
            return []
        readers = program.last_readers
        fresh = (n for n in body.computed if program.is_full(n) and n not in self.held)
        return [n for n in fresh if readers.get(n, stage) > stage]

    def _emit_element_functions(self, stage: int, fast: Body, exact: Body | None, writes: list[Parameter]) -> str:
        """Wrap the statements for one element in the functions that the templates call for V elements.

        `fast` evaluates guards optimistically and returns their sum, which is finite only if all are, as is that of
        `row_check`; `exact`, if there are guards, evaluates them as written. `writes` are the stage's full results.
        """
        tile = list(dict.fromkeys([*fast.tile_parameters, *(exact.tile_parameters if exact else [])]))
        read = [p for p in tile if p.node is not self.program.product]
        if self.one_tile:  # per-column inputs are loaded by each, or once for all
            tile = [p for p in self.program.loaded.values() if p.extent in (FULL, COLUMN)]
            read = [p for p in tile if p.extent == FULL or p in read]
        fields = [f"Pack<{stored_type(p.dtype)}, V> {p.name};" for p in tile]
        load = {
            FULL: "load_between" if self.apart else "load_pack",
            COLUMN: "load_each" if self.shifted else "load_pack",
        }
        loads = {
            extent: [f"t.{p.name} = {load[extent]}<V>({p.element_address});" for p in read if p.extent == extent]
            for extent in (FULL, COLUMN)
        }
        again = loads[FULL]
        if self.evict_last:
            loads[FULL] = [self.load_evicted_last(p) for p in read if p.extent == FULL]
        kinds = {p: "Unrounded" if rounded_in_pairs(p) else "Pack" for p in writes}
        outs = [f"{kind}<{stored_type(p.dtype)}, V> {p.name};" for p, kind in kinds.items()]
        at = f"At<{stage}>"
        signature = (
            f"({at}, const Tile{stage}<V>& tile, int j, i64 row, i64 col, const Row& r, Element& e, "
            f"Out{stage}<V>& out) const {{"
        )
        lines = [
            (
                f"template <int V> using Tile{stage} = Tile0<V>;"
                if self.one_tile and stage > 0
                else f"template <int V> struct Tile{stage} {{ {' '.join(fields)} }};"
            ),
            f"template <int V> struct Out{stage} {{ {' '.join(outs)} }};",
            "template <int V>",
            f"__device__ Out{stage}<V> out({at}) const {{ Out{stage}<V> o; return o; }}",
            "template <int V>",
            f"__device__ Tile{stage}<V> tile({at}) const {{ Tile{stage}<V> t; return t; }}",
            "template <int V>",
            f"__device__ void load({at}, i64 row, i64 col, Tile{stage}<V>& t) const {{ {' '.join(loads[FULL])} }}",
            "template <int V>",
            f"__device__ void load_again({at}, i64 row, i64 col, Tile{stage}<V>& t) const {{ {' '.join(again)} }}",
            "template <int V>",
            f"__device__ void load_columns({at}, i64 col, Tile{stage}<V>& t) const {{ {' '.join(loads[COLUMN])} }}",
            "template <int V>",
            f"__device__ auto element{signature}",
            *(f"    {line}" for line in fast.lines),
            f"    return {' + '.join(fast.checks) or '0.0f'};",
            "}",
            f"__device__ auto row_check({at}, const Row& r) const",
            f"{{ return {' + '.join(fast.row_checks) or '0.0f'}; }}",
        ]
        if stage == 0 and self.one_tile:
            lines += tile_functions(tile, self.packed)
        if self.shared:
            lines += take_functions(stage, read, self.columns)
        if exact is not None:
            body = exact.lines
            if self.outlines and not any("repair_" in line for line in body):  # those are members of the struct
                function, body = outlined(stage, body, exact.tile_parameters, writes, self.program.parameters)
                lines += function
            lines += ["template <int V>", f"__device__ void exact_element{signature}", *(f"    {x}" for x in body), "}"]
        return "\n".join([*lines, *self.emit_store(stage, writes)])

    @staticmethod
    def load_evicted_last(parameter: Parameter) -> str:
        """Emit the load of a full input: whole packs of 16 bytes are evicted last, single elements as others are."""
        whole = f"V * sizeof({stored_type(parameter.dtype)}) == 16"
        target, address = f"t.{parameter.name}", parameter.element_address
        return (
            f"if constexpr ({whole}) {target} = load_evict_last<V>({address}); else {target} = load_pack<V>({address});"
        )

    def emit_store(self, stage: int, writes: list[Parameter]) -> list[str]:
        """Emit the function that stores a stage's full results, as lines."""
        stores = " ".join(f"store_global<V>({p.element_address}, rounded<V>(out.{p.name}));" for p in writes)
        head = f"__device__ void store(At<{stage}>, i64 row, i64 col, const Out{stage}<V>& out) const"
        return ["template <int V>", f"{head} {{ {stores} }}"]

    def emit_finish(self, stage: int) -> str:
        """Emit `finish`: the per-row values that follow a stage's reductions."""
        program = self.program
        accumulators = program.accumulators(stage)
        if not accumulators:
            return ""
        body = Body(self.row_scope())
        body.repair = lambda node: self.emit_joint_repair(node, stage)
        reads, totals_of_shares = read_totals(accumulators), {n.inputs[1] for n in program.shares}
        for node in program.by_stage[stage]:
            if program.is_full(node):
                continue
            if node in reads:
                name = program.names[node]
                self.row_fields[name] = c_type(node.dtype)
                body.line(f"r.{name} = {reads[node]};")
                self.emit_reciprocal(body, node)
                if node in totals_of_shares:
                    self.emit_share(body, name, reads[node].removesuffix(".total()"))
            else:
                self.emit_row_value(body, node)
        head = f"void finish(At<{stage}>, const Totals{stage}& t, const Team& team, i64 row, Row& r) const"
        return "template <class Team>\n" + function_text(head, body)

    def emit_share(self, body: Body, name: str, accumulator: str) -> None:
        """Store what makes shares of a sum of exponentials: of terms that elements hold, or that are computed again."""
        holds_terms = self.in_lanes and not self.streamed
        for read in ("share",) if holds_terms else ("share", "scale", "shift"):
            self.row_fields[f"{name}_{read}"] = "float"
            body.line(f"r.{name}_{read} = {accumulator}.{read}();")

    def emit_column_finish(self) -> str:
        """Emit `finish` of a column step: the per-column values that follow the reductions, and their stores."""
        program = self.program
        body = Body(Scope(program))
        reads = read_totals(program.accumulators(0))
        for node, text in reads.items():
            body.line(f"const {c_type(node.dtype)} {program.names[node]} = {text};")
            body.scope.expressions[node] = program.names[node]
        body.index = ("0", "col")
        for node, parameter in program.outputs.items():
            body.line(f"{parameter.name}[col] = {body.stored(node, parameter.dtype)};")
        return function_text("void finish(const Totals0& t, i64 col) const", body)

    def emit_commit(self) -> str:
        """Emit `commit`: the stores of per-row and scalar results."""
        program = self.program
        if program.by_columns:
            return ""
        body = Body(self.row_scope())
        for node, parameter in program.outputs.items():
            if parameter.extent != FULL:
                once = "if (row == 0) " if parameter.extent == SCALAR else ""
                where = f"row * {parameter.name}_rows" if parameter.has_rows else "0"
                body.line(f"{once}{parameter.name}[{where}] = {body.stored(node, parameter.dtype)};")
        return function_text("void commit(i64 row, const Row& r) const", body)

    def emit_joint_repair(self, node: Node, stage: int) -> str:
        """As `emit_repair`, by all threads of a row; mark `finish` of the stage as run by all of them."""
        self.shared_finish.add(stage)
        return self.emit_repair(node)

    def emit_repair(self, node: Node, team: str = "team") -> str:
        """Emit the function that evaluates a guarded row sum as it was written; return a call of it by a team."""
        name = f"repair_{self.program.names[node]}"
        if name not in self.repairs:
            # Guarded sums within this one are repaired by each thread alone.
            nested = partial(self.emit_repair, team="Solo()")
            self.repairs[name] = repair_function(name, node, self.row_scope(), nested)
        return f"{name}({team}, row, r)"
