#include "cupyfuse_launcher.h"

// Of what Python gives to this module: `cupyfuse/cuda/launcher.py`, `cupyfuse/api/direct_calls.py`.
#define INTERFACE 3

static PyMethodDef methods[] = {
    {"compile", make_launch, METH_VARARGS, "Return the function `launch(addresses, stream)` of a program."},
    {"recognizer", make_recognizer, METH_VARARGS, "Return the function `recognize(args, kwargs)` of calls."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "cupyfuse_launcher",
    .m_doc = "Calls of cupyfuse on a GPU, with less of the host's time.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit_cupyfuse_launcher(void) {
    PyObject* module = PyModule_Create(&definition);
    if (module != NULL && (prepare_recognizers() < 0 || PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) < 0)) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
