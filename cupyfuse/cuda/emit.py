"""Emission: write a step of a plan as a short CUDA struct, which a template of `kernels_cu/` runs.

The struct (`Program`) says what to compute for an element and for a row, and knows nothing of threads; the templates
know nothing of operators. Everything here is text: neither a GPU nor CuPy is needed.
"""

from __future__ import annotations

from collections import ChainMap
from functools import cached_property, partial

from .. import dtypes
from ..ir.graph import Node
from ..plan.schedule import stages_of
from .accumulators import Accumulator
from .c_types import c_type, stored_type
from .config import Config
from .element_functions import element_functions, store_function
from .expressions import Body, Scope, function_text, indented, rounded_in_pairs, struct_text
from .form import Form
from .held import held_columns, held_rows
from .kernel import CONDITION, Kernel, translation_unit
from .parameters import ANY, COLUMN, DIVISORS, FULL, SCALAR, STEPS, Parameter
from .program import Program
from .repair import repair_function
from .shared_rows import held_bytes
from .totals import check_of_states, read_totals, totals_struct


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
    form = Form.of(config, conditional)
    writer = Writer(program, form)
    entry, call = config.entry(merge)
    struct = f"// {program.step.kind}: {', '.join(program.step.fused)}\n{writer.emit_struct()}"
    if form.merges:
        struct += f"\n{check_of_states(program.columns or program.step, writer.column_totals)}"
    threads, blocks = (config.merge_threads, 1) if merge else (config.threads, config.blocks)
    source = translation_unit(
        config.template, struct, entry, f"{call}(p)", threads, blocks, conditional, config.cluster
    )
    elements = config.threads // config.rows * config.packs * config.vec
    shared = held_bytes(program, elements, config.rows, config.columns) if form.shared else 0
    return Kernel(entry, source, tuple(program.parameters), config, shared=shared, cluster=config.cluster)


class Writer:
    """Writes the struct of one program, whose members `kernels_cu/row_block.cu` describes.

    Parameters
    ----------
    program : Program
    form : Form
        What the template asks of the struct.

    Attributes
    ----------
    outlines : bool
        Whether elements are recomputed as written by a function that is not inlined.
    """

    outlines = True

    def __init__(self, program: Program, form: Form | None = None):
        self.program = program
        self.form = Form() if form is None else form
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
            if p.has_repeats:
                pointer += "".join(f" Divisor {p.name}_{each};" for each in DIVISORS)
                pointer += "".join(f" i64 {p.name}_{each};" for each in STEPS)
            declarations.append(pointer)
        declarations.append("i64 rows; i64 cols;")
        if self.form.merges:
            totals = f"Totals{self.column_totals}"
            declarations.append(f"struct {totals}; {totals}* partial; i64 shares;")
        if self.form.conditional:
            declarations.append(CONDITION)
        return declarations

    def emit_struct(self) -> str:
        """Emit the struct `Program` with all its types and functions."""
        form, stages = self.form, range(self.program.stages)
        begin = self.emit_begin()
        bodies = [self.emit_stage(s) for s in stages]
        finishes = [] if self.program.by_columns else [self.emit_finish(s) for s in stages]
        if self.program.by_columns or self.program.columns:
            finishes.append(self.emit_column_finish())
        commit = self.emit_commit()
        reducing = " || ".join(f"stage == {s}" for s in stages if self.program.reductions(s)) or "stage < 0"
        largest = ", ".join(f"sizeof(Totals{s})" for s in stages)
        shared = " || ".join(f"stage == {s}" for s in stages if s in self.shared_finish) or "stage < 0"
        exact = " || ".join(f"stage == {s}" for s in sorted(self.exact_stages)) or "stage < 0"
        sections = [
            "\n".join(self.declare_members()),
            f"static constexpr int stages = {self.program.stages};\n"
            f"static constexpr bool packed = {str(form.packed).lower()}, shifted = {str(form.shifted).lower()}, "
            f"apart = {str(form.apart).lower()}, one_tile = {str(form.one_tile).lower()}, "
            f"columns_known_ahead = {str(self.program.columns_known_ahead).lower()};\n"
            f"static constexpr int column_bytes = {sum(self.program.column_sizes)};  // of an element\n"
            f"__host__ __device__ static constexpr bool reduces(int stage) {{ return {reducing}; }}\n"
            f"__host__ __device__ static constexpr bool has_exact(int stage) {{ return {exact}; }}\n"
            f"__host__ __device__ static constexpr bool shared_finish(int stage) {{ return {shared}; }}",
            struct_text("Row", self.row_fields),
            struct_text("Element", self.element_fields),
            *(totals_struct(s, self.program.accumulators(s), self.read_field, self.terms) for s in stages),
            self.emit_column_totals(),
            f"static constexpr int slot = (largest_of({largest}) + 7) / 8 * 8;",  # a multiple of any alignment
            begin,
            self.emit_misaligned(),
            held_rows(self.program) if form.shared else "",
            held_columns(self.program, form.columns, form.shifted) if form.shared else "",
            *bodies,
            *self.repairs.values(),
            *(f for f in finishes if f),
            commit,
        ]
        return "struct Program {\n" + indented("\n\n".join(s for s in sections if s)) + "\n};"

    @property
    def column_totals(self) -> int:
        """The number of the totals of a column: behind those of the stages of rows, or 0 of a column step."""
        return self.program.stages if self.program.columns else 0

    def emit_column_totals(self) -> str:
        """Emit the totals of a column, and the stage whose elements are added to them."""
        if self.program.columns is None and not self.program.by_columns:
            return ""
        step = self.program.columns or self.program.step
        stages = stages_of(step)
        reduced = [n for n in step.outputs if n.shape[0] == 1 and stages[n] >= 0]
        wide = any(dtypes.ITEMSIZE[n.dtype] > 2 for n in reduced)
        alias = f"typedef Totals{self.column_totals} ColumnTotals;"
        alias += f"\nstatic constexpr bool wide_columns = {'true' if wide else 'false'};"
        if self.program.columns is None:
            return alias
        totals = totals_struct(self.column_totals, self.program.column_accumulators, self.read_field, {})
        return f"{totals}\n{alias}\nstatic constexpr int column_stage = {self.program.column_stage};"

    def emit_misaligned(self) -> str:
        """Emit `misaligned`: how many elements of a row are before its first pack, in all arrays or those written."""
        if not self.form.shifted:
            return ""
        full = [p for p in self.program.parameters if p.extent == FULL]
        array = min(full, key=lambda p: (not p.written, p.repeats))
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
        for node in (*self.program.loaded, *self.program.own_nodes):
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
        for node in program.own_nodes:
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
        operands = [o for o in program.reduced(stage) if o.op != "const"]
        outputs = program.full_outputs.get(stage, [])

        def write_body(optimistic: bool) -> Body:
            scope = self.row_scope()
            if not self.form.recomputed:
                scope = Scope(program, scope.expressions.new_child(self.held)).copy()
            body = Body(scope, tile=True, optimistic=optimistic)
            body.repair = lambda node: self.emit_repair(node, "Solo()")
            for node in [*operands, *outputs]:
                body.value(node)
            kept = dict.fromkeys([*operands, *self.needed_later(stage, body)])
            for node in kept:
                held_in = self.element_field(node)
                if body.value(node) != held_in:
                    if held_in in self.held.values():
                        raise AssertionError(f"{held_in} would lose the value of an earlier stage")
                    body.line(f"{held_in} = {body.value(node)};")
            for node in outputs:
                parameter = program.outputs[node]
                value = (body.unrounded if rounded_in_pairs(parameter) else body.stored)(node, parameter.dtype)
                body.line(f"out.{parameter.name}.v[j] = {value};")
            body.kept = [] if self.form.recomputed else list(kept)
            return body

        fast = write_body(optimistic=True)
        exact = None
        if fast.checks or fast.row_checks:
            self.exact_stages.add(stage)
            exact = write_body(optimistic=False)
        self.held.update((n, self.read_field(n)) for n in (exact or fast).kept)
        if self.form.holds_terms:
            for accumulator in program.accumulators(stage):
                if accumulator.term is not None:
                    self.hold_term(accumulator, accumulator.term, stage)
        writes = [program.outputs[n] for n in outputs]
        functions = element_functions(program, self.form, stage, fast, exact, writes, self.outlines)
        return "\n".join([*functions, *self.emit_store(stage, writes)])

    def hold_term(self, accumulator: Accumulator, term: Node, stage: int) -> None:
        """Hold the terms of a sum of exponentials in Elements: in the operand's field, if no later stage reads that."""
        operand, distance, program = accumulator.operand, term.inputs[0], self.program
        of_shares = any(n.inputs[0] is term for n in program.shares)
        self.terms[term] = None if of_shares else self.term_of_distance(term)
        only_readers = {operand: distance, distance: term}
        # What is known by now may be computed later, where it is read first: that reads the operand then.
        later = [n for n, first in program.first_computed.items() if first > stage]
        is_read = any(i in only_readers and only_readers[i] is not n for n in later for i in n.inputs)
        added = [a for a in program.accumulators(stage) if a.operand is operand]
        is_read |= operand in program.column_reductions
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
        if self.form.recomputed:
            return []
        readers = program.last_readers
        fresh = (n for n in body.computed if program.is_full(n) and n not in self.held)
        return [n for n in fresh if readers.get(n, stage) > stage]

    def emit_store(self, stage: int, writes: list[Parameter]) -> list[str]:
        """Emit the function that stores a stage's full results, as lines."""
        return store_function(stage, writes)

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
        for read in ("share",) if self.form.holds_terms else ("share", "scale", "shift"):
            self.row_fields[f"{name}_{read}"] = "float"
            body.line(f"r.{name}_{read} = {accumulator}.{read}();")

    def emit_column_finish(self) -> str:
        """Emit `finish` of a column: the values that follow its reductions, and their stores."""
        program = self.program
        body = Body(Scope(program))
        reads = read_totals(program.column_accumulators)
        for node, text in reads.items():
            body.line(f"const {c_type(node.dtype)} {program.names[node]} = {text};")
            body.scope.expressions[node] = program.names[node]
        body.index = ("0", "col")
        written = [(n, p) for n, p in program.outputs.items() if n in program.behind_columns]
        for node, parameter in written:
            body.line(f"const auto of_{parameter.name} = {body.stored(node, parameter.dtype)};")
        # Results may lie where arguments do, which all of them have read by now.
        for _, parameter in written:
            body.line(f"{parameter.name}[col] = of_{parameter.name};")
        return function_text(f"void finish(const Totals{self.column_totals}& t, i64 col) const", body)

    def emit_commit(self) -> str:
        """Emit `commit`: the stores of per-row and scalar results."""
        program = self.program
        if program.by_columns:
            return ""
        body = Body(self.row_scope())
        for node, parameter in program.outputs.items():
            if parameter.extent != FULL and node not in program.behind_columns:
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
