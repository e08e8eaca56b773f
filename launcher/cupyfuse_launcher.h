// The module `cupyfuse_launcher`: the host's part of a call on a GPU in C, where Python would take longer.
//
// One module for all versions of Python from 3.10 on (the limited API). It links to no library of CUDA's.
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030a0000
#include <Python.h>

// `compile(steps, data, objects)` returns the function `launch(addresses, stream)` of a program: launches.c.
PyObject* make_launch(PyObject* module, PyObject* arguments);

// `recognizer(settings, calls)` returns the function `recognize(args, kwargs)` of calls: calls.c.
PyObject* make_recognizer(PyObject* module, PyObject* arguments);

// Makes what recognizers need; -1 for an error.
int prepare_recognizers(void);
