// Calls like earlier ones: recognised by their arguments, and run, as `cupyfuse/api/inline_cache.py` does in Python text.
#include "cupyfuse_launcher.h"

// What a recognizer is made of: a function that returns the current settings, and the calls.
enum { SETTINGS, CALLS, RECOGNIZER_PARTS };

// A call: how many arguments come by position, and the names of the others; what its settings have to be; a function whose
// defaults have to be these, or None; a function that returns the variables around, and what their key has to be, or None;
// its values; the arrays that follow those; a function that tells whether its numbers are served, or None; and what runs it.
enum { POSITIONAL, NAMES, SETTINGS_THEN, FUNCTION, DEFAULTS, AROUND, KEY, VALUES, KEPT, COVERS, RUN, CALL_PARTS };

// A value: its kind; its number among the arguments and, behind them, what is given around the function, or -1 for a bound one,
// and that one; what it has to be. For a number that may have any value that is the type; for an array, too, then the shape, the
// strides, the dtype and the device.
enum { KIND, GIVEN, BOUND, EXPECTED, SHAPE, STRIDES, DTYPE, DEVICE, ARRAY_PARTS };
enum { SAME, EQUAL, NUMBER, HELD, ARRAY };

static PyObject *of_shape, *of_strides, *of_dtype, *of_data, *of_device, *of_defaults, *of_keyword_defaults, *of_dict, *of_key,
    *of_given;

// Whether an attribute of an object has a value; -1 for an error.
static int has(PyObject* object, PyObject* name, PyObject* expected) {
    PyObject* found = PyObject_GetAttr(object, name);
    const int same = found == NULL ? -1 : PyObject_RichCompareBool(found, expected, Py_EQ);
    Py_XDECREF(found);
    return same;
}

static int is_like(PyObject* array, PyObject* value) {
    if ((PyObject*)Py_TYPE(array) != PyTuple_GetItem(value, EXPECTED)) {
        return 0;
    }
    int same = has(array, of_shape, PyTuple_GetItem(value, SHAPE));
    same = same == 1 ? has(array, of_strides, PyTuple_GetItem(value, STRIDES)) : same;
    same = same == 1 ? has(array, of_dtype, PyTuple_GetItem(value, DTYPE)) : same;
    PyObject* data = same == 1 ? PyObject_GetAttr(array, of_data) : NULL;
    if (same == 1) {
        same = data == NULL ? -1 : has(data, of_device, PyTuple_GetItem(value, DEVICE));
    }
    Py_XDECREF(data);
    return same;
}

// Compares a value, and adds it to the arrays or to the numbers if it is one. 1: as expected, 0: not, -1: an error.
static int take(PyObject* value, PyObject* found, PyObject* arrays, PyObject* numbers) {
    PyObject* expected = PyTuple_GetItem(value, EXPECTED);
    const long kind = PyLong_AsLong(PyTuple_GetItem(value, KIND));
    int same;
    switch (kind) {
        case SAME:
            return found == expected;
        case EQUAL:
            same = found == expected ||
                   (Py_TYPE(found) == Py_TYPE(expected) ? PyObject_RichCompareBool(found, expected, Py_EQ) : 0);
            return same == 1 && PyLong_CheckExact(expected) && PyList_Append(numbers, found) < 0 ? -1 : same;
        case NUMBER:
            same = (PyObject*)Py_TYPE(found) == expected;
            return same == 1 && PyList_Append(numbers, found) < 0 ? -1 : same;
        default:
            same = kind == HELD ? 1 : is_like(found, value);
            for (Py_ssize_t k = PyList_Size(arrays) - 1; same == 1 && k >= 0; --k) {
                same = PyList_GetItem(arrays, k) != found;  // one that is given twice makes another plan
            }
            return same == 1 && PyList_Append(arrays, found) < 0 ? -1 : same;
    }
}

// Whether the defaults of a function, and the variables around it, which are returned, are those of a call.
static int are_unchanged(PyObject* call, PyObject** variables) {
    PyObject *function = PyTuple_GetItem(call, FUNCTION), *around = PyTuple_GetItem(call, AROUND);
    int same = 1;
    if (function != Py_None) {
        PyObject* found[] = {PyObject_GetAttr(function, of_defaults), PyObject_GetAttr(function, of_keyword_defaults),
                             PyObject_GetAttr(function, of_dict)};
        same = found[0] == NULL || found[1] == NULL || found[2] == NULL ? -1
               : found[0] == PyTuple_GetItem(call, DEFAULTS) && found[1] == Py_None &&
                     PyDict_Check(found[2]) && PyDict_Size(found[2]) == 0;
        for (int k = 0; k < 3; ++k) {
            Py_XDECREF(found[k]);
        }
    }
    if (same == 1 && around != Py_None) {
        *variables = PyObject_CallNoArgs(around);
        same = *variables == NULL ? -1 : *variables != Py_None && has(*variables, of_key, PyTuple_GetItem(call, KEY));
    }
    return same;
}

// Whether a call passes so many arguments by position and by name, with the same settings and surroundings. The variables
// around the function are returned.
static int is_of_form(PyObject* call, PyObject* settings, PyObject* args, PyObject* kwargs, PyObject** variables) {
    if (PyTuple_Size(args) != PyLong_AsSsize_t(PyTuple_GetItem(call, POSITIONAL)) ||
        PyDict_Size(kwargs) != PyTuple_Size(PyTuple_GetItem(call, NAMES))) {
        return 0;
    }
    const int same = PyObject_RichCompareBool(settings, PyTuple_GetItem(call, SETTINGS_THEN), Py_EQ);
    return same == 1 ? are_unchanged(call, variables) : same;
}

// Compares what the variables around a function give by a number, and adds it, as `take` does.
static int take_around(PyObject* value, PyObject* variables, Py_ssize_t number, PyObject* arrays, PyObject* numbers) {
    PyObject* given = variables == NULL ? NULL : PyObject_GetAttr(variables, of_given);
    PyObject* found = given == NULL ? NULL : PyTuple_GetItem(given, number);
    const int same = found != NULL ? take(value, found, arrays, numbers) : PyErr_Occurred() != NULL ? -1 : 0;
    Py_XDECREF(given);
    return same;
}

// Gathers the arrays and numbers of a call. 1: it is like the earlier one, 0: it is not, -1: an error.
static int gather(PyObject* call, PyObject* args, PyObject* kwargs, PyObject* variables, PyObject* arrays, PyObject* numbers) {
    PyObject *names = PyTuple_GetItem(call, NAMES), *values = PyTuple_GetItem(call, VALUES);
    PyObject* kept = PyTuple_GetItem(call, KEPT);
    const Py_ssize_t positional = PyTuple_Size(args), all = positional + PyTuple_Size(names);
    int same = 1;
    for (Py_ssize_t k = 0; same == 1 && k < PyTuple_Size(values); ++k) {
        PyObject* value = PyTuple_GetItem(values, k);
        const Py_ssize_t given = PyLong_AsSsize_t(PyTuple_GetItem(value, GIVEN));
        if (given >= all) {
            same = take_around(value, variables, given - all, arrays, numbers);
            continue;
        }
        PyObject* found = given < 0            ? PyTuple_GetItem(value, BOUND)
                          : given < positional ? PyTuple_GetItem(args, given)
                                               : PyDict_GetItemWithError(kwargs, PyTuple_GetItem(names, given - positional));
        same = found != NULL ? take(value, found, arrays, numbers) : PyErr_Occurred() != NULL ? -1 : 0;
    }
    PyObject* covers = PyTuple_GetItem(call, COVERS);
    if (same == 1 && covers != Py_None) {
        PyObject* served = PyObject_CallFunctionObjArgs(covers, numbers, NULL);
        same = served == NULL ? -1 : PyObject_IsTrue(served);
        Py_XDECREF(served);
    }
    for (Py_ssize_t k = 0; same == 1 && k < PyTuple_Size(kept); ++k) {
        same = PyList_Append(arrays, PyTuple_GetItem(kept, k)) < 0 ? -1 : 1;
    }
    return same;
}

// Returns the result of a call like an earlier one, None for another. What fails while it is compared is no such call.
static PyObject* recognize(PyObject* recognizer, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 2 || !PyTuple_Check(arguments[0]) || !PyDict_Check(arguments[1])) {
        PyErr_SetString(PyExc_TypeError, "recognize: expected a tuple and a dict");
        return NULL;
    }
    PyObject* calls = PyTuple_GetItem(recognizer, CALLS);
    PyObject *settings = PyObject_CallNoArgs(PyTuple_GetItem(recognizer, SETTINGS)), *result = NULL;
    int same = settings == NULL ? -1 : 0;
    for (Py_ssize_t k = 0; same == 0 && k < PyTuple_Size(calls); ++k) {
        PyObject *call = PyTuple_GetItem(calls, k), *arrays = NULL, *numbers = NULL, *variables = NULL;
        same = is_of_form(call, settings, arguments[0], arguments[1], &variables);
        if (same == 1) {
            arrays = PyList_New(0);
            numbers = PyList_New(0);
            same = arrays == NULL || numbers == NULL
                       ? -1
                       : gather(call, arguments[0], arguments[1], variables, arrays, numbers);
        }
        if (same == -1 && PyErr_ExceptionMatches(PyExc_Exception)) {
            PyErr_Clear();
            same = 0;
        }
        if (same == 1) {
            PyObject* results = PyObject_CallFunctionObjArgs(PyTuple_GetItem(call, RUN), arrays, numbers, NULL);
            result = results == NULL ? NULL : PySequence_GetItem(results, 0);
            Py_XDECREF(results);
        }
        Py_XDECREF(variables);
        Py_XDECREF(arrays);
        Py_XDECREF(numbers);
    }
    Py_XDECREF(settings);
    if (same == 0) {
        Py_INCREF(Py_None);
        return Py_None;
    }
    return result;
}

// Making recognizers --------------------------------------------------------------------------------------------------

static PyMethodDef of_recognizers = {"recognize", (PyCFunction)(void (*)(void))recognize, METH_FASTCALL, NULL};

// Whether an object is a tuple of so many parts.
static int is_tuple_of(PyObject* object, Py_ssize_t count) {
    return PyTuple_Check(object) && PyTuple_Size(object) == count;
}

static int is_valid_call(PyObject* call) {
    if (!is_tuple_of(call, CALL_PARTS) || !PyLong_Check(PyTuple_GetItem(call, POSITIONAL)) ||
        !PyTuple_Check(PyTuple_GetItem(call, NAMES)) || !PyTuple_Check(PyTuple_GetItem(call, VALUES)) ||
        !PyTuple_Check(PyTuple_GetItem(call, KEPT)) || !PyCallable_Check(PyTuple_GetItem(call, RUN)) ||
        (PyTuple_GetItem(call, COVERS) != Py_None && !PyCallable_Check(PyTuple_GetItem(call, COVERS)))) {
        return 0;
    }
    PyObject* values = PyTuple_GetItem(call, VALUES);
    const Py_ssize_t positional = PyLong_AsSsize_t(PyTuple_GetItem(call, POSITIONAL));
    const int has_around = PyTuple_GetItem(call, AROUND) != Py_None;
    const Py_ssize_t given = has_around ? PY_SSIZE_T_MAX : positional + PyTuple_Size(PyTuple_GetItem(call, NAMES));
    int valid = positional >= 0;
    for (Py_ssize_t k = 0; valid && k < PyTuple_Size(values); ++k) {
        PyObject* value = PyTuple_GetItem(values, k);
        valid = PyTuple_Check(value) && PyTuple_Size(value) > EXPECTED && PyLong_Check(PyTuple_GetItem(value, KIND)) &&
                PyLong_Check(PyTuple_GetItem(value, GIVEN));
        valid = valid && PyLong_AsSsize_t(PyTuple_GetItem(value, GIVEN)) < given &&
                is_tuple_of(value, PyLong_AsLong(PyTuple_GetItem(value, KIND)) == ARRAY ? ARRAY_PARTS : SHAPE);
    }
    return valid && PyErr_Occurred() == NULL;
}

PyObject* make_recognizer(PyObject* module, PyObject* arguments) {
    (void)module;
    PyObject *settings, *calls;
    if (!PyArg_ParseTuple(arguments, "OO!:recognizer", &settings, &PyTuple_Type, &calls)) {
        return NULL;
    }
    int valid = PyCallable_Check(settings);
    for (Py_ssize_t k = 0; valid && k < PyTuple_Size(calls); ++k) {
        valid = is_valid_call(PyTuple_GetItem(calls, k));
    }
    if (!valid) {
        PyErr_SetString(PyExc_ValueError, "recognizer: the calls are not valid");
        return NULL;
    }
    PyObject* parts = PyTuple_Pack(RECOGNIZER_PARTS, settings, calls);
    PyObject* function = parts == NULL ? NULL : PyCFunction_NewEx(&of_recognizers, parts, NULL);
    Py_XDECREF(parts);
    return function;
}

// Makes the names of attributes that recognizers read; they live as long as the process.
int prepare_recognizers(void) {
    static const struct {
        PyObject** name;
        const char* text;
    } names[] = {
        {&of_shape, "shape"}, {&of_strides, "strides"}, {&of_dtype, "dtype"}, {&of_data, "data"}, {&of_device, "device_id"},
        {&of_defaults, "__defaults__"}, {&of_keyword_defaults, "__kwdefaults__"}, {&of_dict, "__dict__"}, {&of_key, "key"},
        {&of_given, "given"},
    };
    for (size_t k = 0; k < sizeof names / sizeof *names; ++k) {
        if (*names[k].name == NULL && (*names[k].name = PyUnicode_InternFromString(names[k].text)) == NULL) {
            return -1;
        }
    }
    return 0;
}
