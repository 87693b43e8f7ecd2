/* What both examples have: the cache's layout, the bytes of a request, and a way out for errors. */
#ifndef EXAMPLE_H
#define EXAMPLE_H

#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvxfer.h>

/* Both workers have the same model: 4 layers, 8 kv heads of 128 bf16 values, 16 tokens in a block. */
enum {
  LAYERS = 4,
  PLANES = 2 * LAYERS,
  TOKENS_PER_BLOCK = 16,
  BLOCK_BYTES = TOKENS_PER_BLOCK * 8 * 128 * 2,
  POOL_BLOCKS = 64,
  POOL_BYTES = PLANES * POOL_BLOCKS * BLOCK_BYTES,
  /* Every request has this many. */
  REQUEST_TOKENS = 256,
  REQUEST_BLOCKS = REQUEST_TOKENS / TOKENS_PER_BLOCK,
  PATIENCE_MS = 30000
};

/* Ends the program with the library's message if a call did not work. */
static inline void check(int64_t status, const char *what) {
  if (status >= 0) {
    return;
  }
  char message[1024];
  kvx_last_error_message(message, sizeof message);
  fprintf(stderr, "%s: %s\n", what, message);
  exit(1);
}

/* Ends the program if a handle ended in another way than it should. */
static inline void expect(kvx_status status, kvx_status wanted, const char *what) {
  if (status == wanted) {
    return;
  }
  char message[1024] = "";
  if (status < 0) {
    kvx_last_error_message(message, sizeof message);
  }
  fprintf(stderr, "%s: %s, not %s. %s\n", what, kvx_status_name(status), kvx_status_name(wanted), message);
  exit(1);
}

/* An endpoint on this machine, under this name. */
static inline kvx_endpoint create_endpoint(const char *name) {
  kvx_config config;
  check(kvx_config_create(&config), "config");
  check(kvx_config_set(config, "name", name), "name");
  check(kvx_config_set(config, "listen", "127.0.0.1:0"), "listen");
  check(kvx_config_set(config, "transports", "tcp"), "transports");
  kvx_endpoint endpoint;
  check(kvx_endpoint_create(config, &endpoint), "endpoint");
  check(kvx_config_free(config), "config");
  return endpoint;
}

/* One group, and a plane of keys and one of values for each layer, one after another in one region. */
static inline kvx_layout create_layout(void) {
  kvx_group_spec group;
  KVX_INIT(group);
  group.kind = KVX_GROUP_ATTENTION;
  group.name = "attention";
  group.blocks = POOL_BLOCKS;
  group.dtype = KVX_DTYPE_BF16;
  group.tokens_per_block = TOKENS_PER_BLOCK;
  group.kv_heads = 8;
  group.head_size = 128;

  kvx_plane_spec planes[PLANES];
  char names[LAYERS][12];
  for (int layer = 0; layer < LAYERS; layer++) {
    snprintf(names[layer], sizeof names[layer], "%d", layer);
    for (int value = 0; value < 2; value++) {
      kvx_plane_spec *plane = &planes[2 * layer + value];
      KVX_INIT(*plane);
      plane->kind = value ? KVX_PLANE_VALUE : KVX_PLANE_KEY;
      plane->layer = names[layer];
    }
  }

  kvx_layout_spec spec;
  KVX_INIT(spec);
  spec.groups = &group;
  spec.group_count = 1;
  spec.planes = planes;
  spec.plane_count = PLANES;
  kvx_layout layout;
  check(kvx_layout_create(&spec, &layout), "layout");
  return layout;
}

static inline void memory_is_free(void *memory) {
  free(memory);
}

/* A pool in memory of the program's own, which the library gives back when it is done with it. */
static inline kvx_pool create_pool(kvx_endpoint endpoint, kvx_role role, unsigned char **memory) {
  *memory = (unsigned char *)calloc(1, POOL_BYTES);
  if (*memory == NULL) {
    fprintf(stderr, "no memory\n");
    exit(1);
  }
  kvx_region_spec region;
  KVX_INIT(region);
  region.address = *memory;
  region.length = POOL_BYTES;
  region.release = memory_is_free;
  region.release_data = *memory;
  kvx_layout layout = create_layout();
  kvx_pool pool;
  check(kvx_pool_register(endpoint, layout, &region, 1, role, &pool), "pool");
  check(kvx_layout_free(layout), "layout");
  return pool;
}

/* Where a block of a plane begins. */
static inline unsigned char *block_at(unsigned char *memory, uint32_t plane, uint32_t block) {
  return memory + ((size_t)plane * POOL_BLOCKS + block) * BLOCK_BYTES;
}

/* The byte of a request's cache: different for each request, plane, position and place in the block. */
static inline unsigned char cache_byte(uint32_t request, uint32_t plane, uint32_t position, uint32_t at) {
  uint32_t mixed = request * 2654435761u ^ plane * 40503u ^ position * 9176u ^ at * 2246822519u;
  return (unsigned char)(mixed >> 16 ^ mixed >> 7);
}

/* The selection of the tokens [first, end) of a request whose blocks are given in token order. */
static inline kvx_group_selection select_tokens(uint32_t first, uint32_t end, const uint32_t *blocks) {
  kvx_group_selection selection;
  selection.first_token = first;
  selection.token_end = end;
  selection.blocks = blocks + first / TOKENS_PER_BLOCK;
  selection.block_count = (end + TOKENS_PER_BLOCK - 1) / TOKENS_PER_BLOCK - first / TOKENS_PER_BLOCK;
  return selection;
}

/* Waits for the event of this kind and number. Others of the number are passed over, and so are kinds that came with a
   later version of the library. */
static inline kvx_event await_event(kvx_endpoint endpoint, kvx_event_kind kind, uint64_t data) {
  int fd;
  check(kvx_events_fd(endpoint, &fd), "events");
  for (;;) {
    kvx_event event;
    size_t count;
    check(kvx_events_drain(endpoint, &event, sizeof event, 1, &count), "events");
    if (count == 1) {
      if (event.data == data && event.kind == kind) {
        return event;
      }
      continue;
    }
    struct pollfd waiting;
    waiting.fd = fd;
    waiting.events = POLLIN;
    if (poll(&waiting, 1, PATIENCE_MS) <= 0) {
      fprintf(stderr, "request %" PRIu64 ": event %" PRIu32 " did not come\n", data, kind);
      exit(1);
    }
  }
}

#endif
