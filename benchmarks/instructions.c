// For benchmarks/instructions.py: streams and events of an accelerator that is not there, and requests to callgrind.
//
// Methods are C, as those of torch.Stream and torch.Event are, so that what calls them costs what it costs on a GPU's host.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <valgrind/callgrind.h>

typedef struct {
  PyObject_HEAD
} Object;

static PyObject* current;  // stream

static PyObject* nothing(PyObject* self, PyObject* argument) { Py_RETURN_NONE; }

static PyMethodDef stream_methods[] = {{"record_event", nothing, METH_O, ""}, {"wait_event", nothing, METH_O, ""}, {NULL}};
static PyTypeObject Stream = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "instructions.Stream",
    .tp_basicsize = sizeof(Object),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_methods = stream_methods,
};
static PyTypeObject Event = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "instructions.Event",
    .tp_basicsize = sizeof(Object),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
};

static PyObject* current_stream(PyObject* module, PyObject* device) { return Py_NewRef(current); }

static PyObject* set_stream(PyObject* module, PyObject* stream) {
  Py_SETREF(current, Py_NewRef(stream));
  Py_RETURN_NONE;
}

static PyObject* begin(PyObject* module, PyObject* unused) {
  CALLGRIND_START_INSTRUMENTATION;
  Py_RETURN_NONE;
}

static PyObject* zero(PyObject* module, PyObject* unused) {
  CALLGRIND_ZERO_STATS;
  Py_RETURN_NONE;
}

static PyObject* end(PyObject* module, PyObject* name) {
  CALLGRIND_DUMP_STATS_AT(PyUnicode_AsUTF8(name));
  CALLGRIND_STOP_INSTRUMENTATION;
  Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"current_stream", current_stream, METH_O, ""},
    {"set_stream", set_stream, METH_O, ""},
    {"begin", begin, METH_NOARGS, ""},
    {"zero", zero, METH_NOARGS, ""},
    {"end", end, METH_O, ""},
    {NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "stand_ins", NULL, -1, functions};

PyMODINIT_FUNC PyInit_stand_ins(void) {
  if (PyType_Ready(&Stream) || PyType_Ready(&Event)) return NULL;
  PyObject* module = PyModule_Create(&definition);
  PyModule_AddObject(module, "Stream", Py_NewRef((PyObject*)&Stream));
  PyModule_AddObject(module, "Event", Py_NewRef((PyObject*)&Event));
  current = PyObject_CallNoArgs((PyObject*)&Stream);
  return module;
}
