/*
 * A decode worker: claims the KV cache of four requests from a prefill worker, and checks its bytes.
 *
 *   ./decode ADDRESS   with the address that ./prefill printed
 */
#include "example.h"

static kvx_endpoint endpoint;
static kvx_pool pool;
static unsigned char *memory;
static kvx_address prefill;

static kvx_claim claim_request(uint32_t request) {
  char key[32];
  int length = snprintf(key, sizeof key, "request-%" PRIu32, request);
  kvx_claim_options options;
  KVX_INIT(options);
  options.events = 1;
  options.event_data = request;
  kvx_claim claim;
  check(kvx_claim_open(endpoint, key, (size_t)length, pool, &prefill, 1, &options, &claim), "claim");
  return claim;
}

static void fill(kvx_claim claim, const uint32_t *blocks) {
  kvx_group_selection selection = select_tokens(0, REQUEST_TOKENS, blocks);
  check(kvx_claim_fill(claim, &selection, 1), "fill");
}

/* Waits until the claim has ended. No byte of it lands after that, so that the blocks may be used for something else. */
static kvx_status await_end(uint32_t request, kvx_claim claim) {
  await_event(endpoint, KVX_EVENT_ENDED, request);
  kvx_result result;
  KVX_INIT(result);
  kvx_status status = kvx_handle_poll(claim, &result);
  if (result.destination == KVX_DESTINATION_QUARANTINED) {
    fprintf(stderr, "request %" PRIu32 ": its blocks must not be used again\n", request);
    exit(1);
  }
  if (status < 0) {
    char why[512];
    check(kvx_handle_error(claim, why, sizeof why), "error");
    printf("request %" PRIu32 ": %s\n", request, why);
  } else {
    printf("request %" PRIu32 ": %" PRIu64 " bytes arrived\n", request, result.bytes);
  }
  check(kvx_handle_free(claim), "claim");
  return status;
}

/* Bytes that came from peers so far: one of the counters that the library keeps, in Prometheus' text form. */
static double bytes_received(void) {
  int64_t length = kvx_endpoint_metrics(endpoint, NULL, 0);
  check(length, "metrics");
  size_t capacity = (size_t)length + 4096;
  char *text = (char *)malloc(capacity);
  if (text == NULL) {
    fprintf(stderr, "no memory\n");
    exit(1);
  }
  check(kvx_endpoint_metrics(endpoint, text, capacity), "metrics");
  double sum = 0;
  for (char *line = strtok(text, "\n"); line != NULL; line = strtok(NULL, "\n")) {
    if (strncmp(line, "kvxfer_rail_bytes_total{", strlen("kvxfer_rail_bytes_total{")) == 0 && strstr(line, "direction=\"received\"")) {
      sum += strtod(strrchr(line, ' '), NULL);
    }
  }
  free(text);
  return sum;
}

/* Compares every byte of a request with what prefill computed. */
static void verify(uint32_t request, const uint32_t *blocks) {
  for (uint32_t plane = 0; plane < PLANES; plane++) {
    for (uint32_t position = 0; position < REQUEST_BLOCKS; position++) {
      const unsigned char *block = block_at(memory, plane, blocks[position]);
      for (uint32_t at = 0; at < BLOCK_BYTES; at++) {
        if (block[at] != cache_byte(request, plane, position, at)) {
          fprintf(stderr, "request %" PRIu32 ": plane %" PRIu32 ", block %" PRIu32 ", byte %" PRIu32 " is wrong\n",
                  request, plane, blocks[position], at);
          exit(1);
        }
      }
    }
  }
  printf("request %" PRIu32 ": every byte is right\n", request);
}

int main(int count, char **arguments) {
  if (count != 2) {
    fprintf(stderr, "usage: decode ADDRESS\n");
    return 2;
  }
  setvbuf(stdout, NULL, _IOLBF, 0);
  endpoint = create_endpoint("decode-0");
  pool = create_pool(endpoint, KVX_ROLE_RECEIVE, &memory);
  check(kvx_address_parse(arguments[1], &prefill), "address");

  uint32_t blocks[REQUEST_BLOCKS];
  for (uint32_t position = 0; position < REQUEST_BLOCKS; position++) {
    blocks[position] = POOL_BLOCKS - 1 - position * 3;
  }

  /* Request 1: claimed when it is known, filled when there are blocks for it. */
  kvx_claim claim = claim_request(1);
  fill(claim, blocks);
  expect(await_end(1, claim), KVX_OK, "request 1");
  verify(1, blocks);

  /* How the bytes went, and why not in another way. */
  char path[4096];
  check(kvx_endpoint_explain(endpoint, prefill, path, sizeof path), "explain");
  printf("%s", path);

  /* Request 2: aborted while bytes are on their way: some have come, and half of the request has not even been computed. */
  double before = bytes_received();
  claim = claim_request(2);
  fill(claim, blocks);
  await_event(endpoint, KVX_EVENT_MATCHED, 2);
  for (int waited = 0; bytes_received() <= before && waited < PATIENCE_MS; waited++) {
    poll(NULL, 0, 1);
  }
  char waits_for[128];
  check(kvx_handle_waiting_on(claim, waits_for, sizeof waits_for, NULL), "waiting on");
  printf("request 2: cancelled while it waits for: %s\n", waits_for);
  check(kvx_handle_cancel(claim), "cancel");
  expect(await_end(2, claim), KVX_ERR_CANCELLED, "request 2");

  /* Request 3: the same blocks at once. Were a byte of request 2 still to land, it would be found here. */
  claim = claim_request(3);
  fill(claim, blocks);
  expect(await_end(3, claim), KVX_OK, "request 3");
  verify(3, blocks);

  /* Request 4: declined, before it has blocks. */
  claim = claim_request(4);
  check(kvx_claim_decline(claim), "decline");
  expect(await_end(4, claim), KVX_ERR_DECLINED, "request 4");

  check(kvx_address_free(prefill), "address");
  check(kvx_endpoint_drain(endpoint, PATIENCE_MS), "drain");
  check(kvx_pool_free(pool), "pool");
  check(kvx_endpoint_destroy(endpoint, PATIENCE_MS), "endpoint");
  printf("decode: done\n");
  return 0;
}
