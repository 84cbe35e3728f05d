/* Preloaded into tritonserver: 40 ms before each thread that the Python backend itself starts. Its pool of 32 threads
   then takes more than a second to make, and with it the gap between a model's `initialize` and the moment from which
   its calls are safe (docs/queue.md). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

typedef int (*create_t)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument) {
  static create_t real;
  Dl_info caller;
  if (!real) real = (create_t)dlsym(RTLD_NEXT, "pthread_create");
  if (dladdr(__builtin_return_address(0), &caller) && caller.dli_fname && strstr(caller.dli_fname, "libtriton_python"))
    usleep(40000);
  return real(thread, attributes, start, argument);
}
