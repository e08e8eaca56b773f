// Launches of a plan, run from a program of few steps: what `cupyfuse/cuda/launch.py` otherwise writes as Python text.
//
// A launch fills addresses and numbers into structs on its own stack, so threads, and launches within a launch (by a
// finalizer), share nothing. The driver copies a struct before it returns. `compile` checks a program once; after that a
// step reads no memory but the program's, the list of addresses and the structs. The addresses of the driver's two
// functions are part of a program.
#include "cupyfuse_launcher.h"

#include <stdint.h>
#include <string.h>

#define MOST_WORDS 4096  // of a struct, on the stack
#define MAP_WORDS 16
#define MOST_DEVICES 64

// The driver's interface, as far as it is used ------------------------------------------------------------------------

typedef struct {
    int id, padding;
    int value[16];
} Attribute;

typedef struct {
    unsigned grid[3], block[3], shared;
    void* stream;
    const Attribute* attributes;
    unsigned attribute_count;
} LaunchConfig;

typedef int (*LaunchKernel)(const LaunchConfig* config, void* function, void** arguments, void** extra);
typedef int (*EncodeTiled)(
    void* map, int type, unsigned rank, void* address, const uint64_t* sizes, const uint64_t* strides, const unsigned* box,
    const unsigned* steps, int interleave, int swizzle, int promotion, int fill
);

static const Attribute begins_early = {6, 0, {1}};  // programmatic stream serialization

// Programs ------------------------------------------------------------------------------------------------------------

enum Op {
    HEADER,   // a: address of cuLaunchKernelEx, b: of cuTensorMapEncodeTiled, c: device, d: whether launches begin early
    CALL,     // a: object, called with the addresses and the stream
    STRUCT,   // a: where its members are in the data, b: how many
    POINTER,  // a: member, b: slot, c: bytes from there
    CHECK,    // a: member that has to be aligned
    ALIGNED,  // a: bits that are 0 where all are, b: object called otherwise, c: the step to go on with then
    NUMBER,   // a: member, b: slot, c: object that evaluates it
    MAP,      // a: member, b: slot, c: bytes from there, d: where its `Matrix` is in the data or -1, e: object instead
    LAUNCH,   // a: where its `Kernel` is in the data, b: whether it is the last one with this struct
};

typedef struct {
    int64_t op, a, b, c, d, e;
} Step;

typedef struct {
    uint64_t function;
    unsigned grid[3], block[3], shared, padding;
} Kernel;

typedef struct {
    uint64_t sizes[2], strides[1], alignment;
    unsigned box[2], steps[2];
    int type, rank, interleave, swizzle, promotion, fill;
} Matrix;

// The first objects of a program: what launches on anything but a stream, and in a thread's first launch; an exception.
enum { IN_PYTHON, ERROR, FIRST_OBJECT };

// What a program consists of, as a tuple.
enum { STEPS, DATA, OBJECTS, PARTS };

// Devices on which the thread has launched by Python, which makes their contexts current; a bit each.
static _Thread_local uint64_t begun;

typedef union {
    uint64_t integer;
    double real;
} Word;

static int read_address(PyObject* at, const Step* step, uint64_t* address) {
    PyObject* value = PyList_GetItem(at, (Py_ssize_t)step->b);  // borrowed; raises IndexError
    if (value == NULL) {
        return -1;
    }
    const uint64_t base = PyLong_AsUnsignedLongLong(value);
    if (base == UINT64_MAX && PyErr_Occurred() != NULL) {
        return -1;
    }
    *address = base + (uint64_t)step->c;
    if (step->c < 0 ? *address > base : *address < base) {
        PyErr_Format(PyExc_OverflowError, "address %llu: %lld bytes from there is no address",
                     (unsigned long long)base, (long long)step->c);
        return -1;
    }
    return 0;
}

static int evaluate(PyObject* at, const Step* step, PyObject* function, double* value) {
    PyObject* numbers = PyList_GetItem(at, (Py_ssize_t)step->b);
    if (numbers == NULL) {
        return -1;
    }
    Py_INCREF(numbers);  // the call may change the list
    PyObject* found = PyObject_CallFunctionObjArgs(function, numbers, NULL);
    Py_DECREF(numbers);
    if (found == NULL) {
        return -1;
    }
    *value = PyFloat_AsDouble(found);
    Py_DECREF(found);
    return *value == -1.0 && PyErr_Occurred() != NULL ? -1 : 0;
}

// Takes the words of a tensor map from Python, and adds what has to live until the launch to `*held`.
static int map_in_python(PyObject* at, PyObject* function, Word* words, PyObject** held) {
    PyObject* pair = PyObject_CallFunctionObjArgs(function, at, NULL);
    PyObject *found = NULL, *memory = NULL;
    int status = -1;
    if (pair != NULL && (found = PySequence_GetItem(pair, 0)) != NULL && (memory = PySequence_GetItem(pair, 1)) != NULL) {
        status = 0;
        for (Py_ssize_t k = 0; status == 0 && k < MAP_WORDS; ++k) {
            PyObject* word = PySequence_GetItem(found, k);
            words[k].integer = word == NULL ? 0 : PyLong_AsUnsignedLongLong(word);
            status = PyErr_Occurred() != NULL ? -1 : 0;
            Py_XDECREF(word);
        }
    }
    if (status == 0 && (*held != NULL || (*held = PyList_New(0)) != NULL)) {
        status = PyList_Append(*held, memory);
    } else {
        status = -1;
    }
    Py_XDECREF(memory);
    Py_XDECREF(found);
    Py_XDECREF(pair);
    return status;
}

// Encodes a tensor map. What is not aligned, or what the driver refuses, is left to Python: it copies, or says why.
static int map(PyObject* at, const Step* step, uintptr_t encode, const char* data, PyObject* function, Word* words,
               PyObject** held) {
    Matrix m;
    _Alignas(128) uint64_t encoded[MAP_WORDS];
    uint64_t address;
    if (step->d < 0) {
        return map_in_python(at, function, words, held);
    }
    if (read_address(at, step, &address) < 0) {
        return -1;
    }
    memcpy(&m, data + step->d, sizeof m);
    if ((address & (m.alignment - 1)) != 0 ||
        ((EncodeTiled)encode)(encoded, m.type, (unsigned)m.rank, (void*)(uintptr_t)address, m.sizes, m.strides, m.box,
                              m.steps, m.interleave, m.swizzle, m.promotion, m.fill) != 0) {
        return map_in_python(at, function, words, held);
    }
    memcpy(words, encoded, sizeof encoded);
    return 0;
}

static int call(PyObject* function, PyObject* at, PyObject* stream) {
    PyObject* result = PyObject_CallFunctionObjArgs(function, at, stream, NULL);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

static int run(const Step* steps, Py_ssize_t count, const char* data, PyObject* objects, PyObject* at, PyObject* stream,
               PyObject** held) {
    Word words[MOST_WORDS];
    void* arguments[] = {words};
    LaunchConfig config = {.attributes = &begins_early, .attribute_count = steps[0].d != 0};
    Kernel kernel;
    uint64_t checked = 0;
    config.stream = (void*)(uintptr_t)PyLong_AsUnsignedLongLong(stream);
    int status = PyErr_Occurred() != NULL ? -1 : 0;
    for (Py_ssize_t k = 1; status == 0 && k < count; ++k) {
        const Step* s = &steps[k];
        switch (s->op) {
            case CALL:
                status = call(PyTuple_GetItem(objects, (Py_ssize_t)s->a), at, stream);
                break;
            case STRUCT:
                memcpy(words, data + s->a, (size_t)s->b * sizeof *words);
                checked = 0;
                break;
            case POINTER:
                status = read_address(at, s, &words[s->a].integer);
                break;
            case CHECK:
                checked |= words[s->a].integer;
                break;
            case ALIGNED:
                if ((checked & (uint64_t)s->a) != 0) {
                    status = call(PyTuple_GetItem(objects, (Py_ssize_t)s->b), at, stream);
                    k = (Py_ssize_t)s->c - 1;
                }
                break;
            case NUMBER:
                status = evaluate(at, s, PyTuple_GetItem(objects, (Py_ssize_t)s->c), &words[s->a].real);
                break;
            case MAP:
                status = map(at, s, (uintptr_t)steps[0].b, data, PyTuple_GetItem(objects, (Py_ssize_t)s->e), &words[s->a],
                             held);
                break;
            default:  // LAUNCH
                memcpy(&kernel, data + s->a, sizeof kernel);
                memcpy(config.grid, kernel.grid, sizeof config.grid);
                memcpy(config.block, kernel.block, sizeof config.block);
                config.shared = kernel.shared;
                int refused;
                // A full stream blocks, maybe until Python has run in another thread: a host function, a collective's
                // launch on another GPU.
                Py_BEGIN_ALLOW_THREADS
                refused = ((LaunchKernel)(uintptr_t)steps[0].a)(&config, (void*)(uintptr_t)kernel.function, arguments, NULL);
                Py_END_ALLOW_THREADS
                if (refused != 0) {
                    PyErr_Format(PyTuple_GetItem(objects, ERROR), "cuLaunchKernelEx failed with status %d", refused);
                    status = -1;
                }
                if (s->b) {
                    Py_CLEAR(*held);
                }
        }
    }
    return status;
}

static PyObject* launch(PyObject* program, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 2 || !PyList_Check(arguments[0])) {
        PyErr_SetString(PyExc_TypeError, "launch: expected a list of addresses and a stream");
        return NULL;
    }
    PyObject *at = arguments[0], *stream = arguments[1], *objects = PyTuple_GetItem(program, OBJECTS), *held = NULL;
    PyObject* packed = PyTuple_GetItem(program, STEPS);
    const Step* steps = (const Step*)PyBytes_AsString(packed);
    const uint64_t device = (uint64_t)1 << steps[0].c;
    if (!PyLong_CheckExact(stream) || (begun & device) == 0) {
        PyObject* result = PyObject_CallFunctionObjArgs(PyTuple_GetItem(objects, IN_PYTHON), at, stream, NULL);
        begun |= result != NULL && PyLong_CheckExact(stream) ? device : 0;
        return result;
    }
    const Py_ssize_t length = PyBytes_Size(packed) / (Py_ssize_t)sizeof(Step);
    const int status = run(steps, length, PyBytes_AsString(PyTuple_GetItem(program, DATA)), objects, at, stream, &held);
    Py_XDECREF(held);
    if (status < 0) {
        return NULL;
    }
    Py_INCREF(Py_None);
    return Py_None;
}

// Making programs -----------------------------------------------------------------------------------------------------

// Whether `size` units from `first` on are within `length` of them.
static int within(int64_t first, int64_t size, int64_t length) {
    return first >= 0 && size >= 0 && first <= length && size <= length - first;
}

static int is_valid(const Step* s, Py_ssize_t k, Py_ssize_t count, Py_ssize_t nbytes, Py_ssize_t objects) {
    if ((k == 0) != (s->op == HEADER)) {
        return 0;
    }
    switch (s->op) {
        case HEADER:
            return s->a != 0 && s->b != 0 && within(s->c, 1, MOST_DEVICES);
        case CALL:
            return within(s->a, 1, objects);
        case STRUCT:
            return within(s->b, 0, MOST_WORDS) && within(s->a, 8 * s->b, nbytes);
        case POINTER:
        case CHECK:
            return within(s->a, 1, MOST_WORDS);
        case ALIGNED:
            return within(s->b, 1, objects) && s->c > k && s->c <= count;
        case NUMBER:
            return within(s->a, 1, MOST_WORDS) && within(s->c, 1, objects);
        case MAP:
            return within(s->a, MAP_WORDS, MOST_WORDS) && within(s->e, 1, objects) &&
                   (s->d == -1 || within(s->d, sizeof(Matrix), nbytes));
        case LAUNCH:
            return within(s->a, sizeof(Kernel), nbytes);
        default:
            return 0;
    }
}

static PyMethodDef of_programs = {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, NULL};

PyObject* make_launch(PyObject* module, PyObject* arguments) {
    (void)module;
    PyObject *steps, *data, *objects;
    if (!PyArg_ParseTuple(arguments, "SSO!:compile", &steps, &data, &PyTuple_Type, &objects)) {
        return NULL;
    }
    const Py_ssize_t nbytes = PyBytes_Size(steps), held = PyTuple_Size(objects), count = nbytes / (Py_ssize_t)sizeof(Step);
    int valid = count > 0 && nbytes % (Py_ssize_t)sizeof(Step) == 0 && held >= FIRST_OBJECT;
    for (Py_ssize_t k = 0; valid && k < held; ++k) {
        valid = PyCallable_Check(PyTuple_GetItem(objects, k));
    }
    for (Py_ssize_t k = 0; valid && k < count; ++k) {
        valid = is_valid((const Step*)PyBytes_AsString(steps) + k, k, count, PyBytes_Size(data), held);
    }
    if (!valid) {
        PyErr_SetString(PyExc_ValueError, "compile: the program is not valid");
        return NULL;
    }
    PyObject* program = PyTuple_Pack(PARTS, steps, data, objects);
    PyObject* function = program == NULL ? NULL : PyCFunction_NewEx(&of_programs, program, NULL);
    Py_XDECREF(program);
    return function;
}
