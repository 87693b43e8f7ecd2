/* What the bindings are generated from: see generate.sh. */
#include <infiniband/verbs.h>
