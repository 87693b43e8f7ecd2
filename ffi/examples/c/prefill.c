/*
 * A prefill worker: computes the KV cache of four requests and offers it.
 *
 *   ./prefill          prints its address, then waits for ./decode ADDRESS
 *
 * Request 1 is streamed while it is computed. Request 2 is aborted by decode in mid-air. Request 3 uses the same blocks at
 * once. Request 4 is declined.
 */
#include "example.h"

static kvx_endpoint endpoint;
static kvx_pool pool;
static unsigned char *memory;

/* "Computes" tokens of some layers of a request: writes their bytes. */
static void compute(uint32_t request, const uint32_t *blocks, uint32_t first_token, uint32_t token_end,
                    uint32_t first_layer, uint32_t layer_end) {
  for (uint32_t plane = 2 * first_layer; plane < 2 * layer_end; plane++) {
    for (uint32_t position = first_token / TOKENS_PER_BLOCK; position * TOKENS_PER_BLOCK < token_end; position++) {
      unsigned char *block = block_at(memory, plane, blocks[position]);
      for (uint32_t at = 0; at < BLOCK_BYTES; at++) {
        block[at] = cache_byte(request, plane, position, at);
      }
    }
  }
}

static kvx_offer offer_request(uint32_t request) {
  char key[32];
  int length = snprintf(key, sizeof key, "request-%" PRIu32, request);
  kvx_offer_options options;
  KVX_INIT(options);
  options.events = 1;
  options.event_data = request;
  kvx_offer offer;
  check(kvx_offer_open(endpoint, key, (size_t)length, pool, &options, &offer), "offer");
  return offer;
}

static void append(kvx_offer offer, const uint32_t *blocks, uint32_t first_token, uint32_t token_end) {
  kvx_group_selection selection = select_tokens(first_token, token_end, blocks);
  check(kvx_offer_append(offer, &selection, 1), "append");
}

/* Waits until the offer has ended. Its blocks are ours again then, however it ended. */
static kvx_status await_end(uint32_t request, kvx_offer offer) {
  await_event(endpoint, KVX_EVENT_ENDED, request);
  /* With one reader, an offer ends as its claim does. With several, kvx_handle_members has a verdict of each. */
  kvx_status status = kvx_handle_poll(offer, NULL);
  printf("request %" PRIu32 ": its end is %s, the blocks are free\n", request, kvx_status_name(status));
  check(kvx_handle_free(offer), "offer");
  return status;
}

int main(void) {
  setvbuf(stdout, NULL, _IOLBF, 0);
  endpoint = create_endpoint("prefill-0");
  pool = create_pool(endpoint, KVX_ROLE_SERVE, &memory);

  kvx_address address;
  char text[128];
  check(kvx_endpoint_address(endpoint, &address), "address");
  check(kvx_address_text(address, text, sizeof text), "address");
  check(kvx_address_free(address), "address");
  printf("address: %s\n", text);

  /* The blocks of a request need not be neighbours. */
  uint32_t blocks[REQUEST_BLOCKS];
  for (uint32_t position = 0; position < REQUEST_BLOCKS; position++) {
    blocks[position] = (position * 7 + 3) % POOL_BLOCKS;
  }

  /* Request 1: chunk by chunk, the last chunk layer by layer. What is ready is on its way while the rest is computed. */
  kvx_offer offer = offer_request(1);
  const uint32_t chunk = REQUEST_TOKENS / 4;
  for (uint32_t first = 0; first < REQUEST_TOKENS; first += chunk) {
    append(offer, blocks, first, first + chunk);
    if (first + chunk < REQUEST_TOKENS) {
      compute(1, blocks, first, first + chunk, 0, LAYERS);
      check(kvx_offer_ready(offer, first, first + chunk, 0, 0), "ready");
      continue;
    }
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
      compute(1, blocks, first, first + chunk, layer, layer + 1);
      check(kvx_offer_ready(offer, first, first + chunk, layer, layer + 1), "ready");
    }
  }
  check(kvx_offer_finish(offer, REQUEST_TOKENS), "finish");
  printf("request 1: offered in %d chunks\n", REQUEST_TOKENS / (int)chunk);
  expect(await_end(1, offer), KVX_OK, "request 1");

  /* Request 2: half of it is on its way, the rest is still being computed, when decode aborts it. */
  offer = offer_request(2);
  append(offer, blocks, 0, REQUEST_TOKENS);
  compute(2, blocks, 0, REQUEST_TOKENS / 2, 0, LAYERS);
  check(kvx_offer_ready(offer, 0, REQUEST_TOKENS / 2, 0, 0), "ready");
  printf("request 2: half of it is ready\n");
  expect(await_end(2, offer), KVX_ERR_CANCELLED, "request 2");

  /* Request 3: other bytes in the blocks that were just read from. */
  offer = offer_request(3);
  append(offer, blocks, 0, REQUEST_TOKENS);
  compute(3, blocks, 0, REQUEST_TOKENS, 0, LAYERS);
  check(kvx_offer_finish(offer, REQUEST_TOKENS), "finish");
  printf("request 3: offered, in the same blocks\n");
  expect(await_end(3, offer), KVX_OK, "request 3");

  /* Request 4: decode does not want it. If it said so already, the offer has ended, and nothing can be appended. */
  offer = offer_request(4);
  kvx_group_selection selection = select_tokens(0, REQUEST_TOKENS, blocks);
  kvx_status appended = kvx_offer_append(offer, &selection, 1);
  if (appended != KVX_ERR_CLOSED) {
    check(appended, "append");
  }
  printf("request 4: offered\n");
  expect(await_end(4, offer), KVX_ERR_DECLINED, "request 4");

  check(kvx_endpoint_drain(endpoint, PATIENCE_MS), "drain");
  check(kvx_pool_free(pool), "pool");
  check(kvx_endpoint_destroy(endpoint, PATIENCE_MS), "endpoint");
  printf("prefill: done\n");
  return 0;
}
