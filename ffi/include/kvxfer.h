/*
 * kvxfer: moves the KV cache of large-language-model requests from prefill to decode workers.
 *
 * Generated from the Rust sources by cbindgen: change those, not this file. The guide is docs/c.md.
 *
 * Handles. Endpoints, pools, offers and so on are numbers. 0 is never one. A handle that was freed, that is of another
 * kind or that never was one is KVX_ERR_INVALID_ARGUMENT, and nothing else happens; so is freeing twice. A handle may be
 * freed while another thread is in a call on it. What a call creates is written last: on failure the handle is 0.
 *
 * Statuses. Most calls give a kvx_status: KVX_OK, KVX_PENDING, or a negative KVX_ERR_... code. kvx_last_error_message says
 * what, where, why and what to do, for the last call that failed on this thread; kvx_handle_error, for what ended a handle.
 * No exception and no panic leaves the library: a defect is KVX_ERR_INTERNAL.
 *
 * Texts go in as UTF-8 that ends with a NUL (names at most 256 bytes, values and paths 4,096, TOML 1 MiB); keys and messages
 * as pointer and length. Texts and bytes come out as snprintf does it: the call gives the length of all of it (without the
 * NUL), or a negative status. A text that does not fit is cut and ends with a NUL; bytes are written only if they all fit.
 * A null buffer with capacity 0 only asks for the length.
 *
 * Structs that may grow begin with struct_size. KVX_INIT(options) sets it and everything else to zero, which is the default
 * everywhere. A library that is older than the header refuses what it does not know, unless it is zero.
 *
 * Times are in milliseconds. A timeout of 0 looks and does not wait; KVX_FOREVER waits without limit. A deadline of 0 is none.
 *
 * Threads. Every call may be made from any thread, at the same time as any other.
 *
 * Calls that may block, each for at most the timeout that it takes:
 *   kvx_endpoint_connect, kvx_endpoint_drain, kvx_endpoint_close, kvx_endpoint_destroy, kvx_pool_close_wait,
 *   kvx_handle_wait, kvx_events_wait;
 *   and kvx_offer_retract, for at most the configuration's deadlines.retract_ms_max.
 * All others return at once.
 *
 * fork. In a child of a process that used the library every call is KVX_ERR_UNSUPPORTED and touches nothing; what the parent
 * had open stays the parent's. (kvx_last_error..., kvx_status_... and the version calls answer.) After exec all is as new.
 */


#ifndef KVXFER_H
#define KVXFER_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Sets a struct to its defaults: all zeros, and its size. */
#define KVX_INIT(options) \
  (memset(&(options), 0, sizeof(options)), (void)((options).struct_size = (uint32_t)sizeof(options)))

/* A timeout without limit. */
#define KVX_FOREVER UINT64_MAX

/* The highest kvx_abi_version that this header describes. */
#define KVX_ABI_VERSION 2

// What most calls give back: KVX_OK, KVX_PENDING (not yet), or a negative KVX_ERR_... code.
typedef int32_t kvx_status;

// What is known of the destination blocks after a failure.
typedef uint32_t kvx_destination;

// An error, for programs. Its text comes from kvx_last_error_message or kvx_handle_error.
typedef struct {
  // sizeof(kvx_error), set by the caller.
  uint32_t struct_size;
  // KVX_OK if there was no error yet, or its KVX_ERR_... code.
  kvx_status status;
  // 1 if repeating the operation later can succeed without a change by the caller.
  uint32_t retryable;
  // What is known of the destination blocks.
  kvx_destination destination;
} kvx_error;

// An endpoint's address: its sockets, incarnation and ranks. Freed by kvx_address_free.
typedef uint64_t kvx_address;

// 128 bits, highest byte first: an incarnation, or the number of a claim set. All zeros say "none".
typedef struct {
  // The bytes, in the order in which their hexadecimal form is read.
  uint8_t bytes[16];
} kvx_id128;

// What an address says.
typedef struct {
  // sizeof(kvx_address_info), set by the caller.
  uint32_t struct_size;
  // Sockets in it: 1 or 2.
  uint32_t sockets;
  // Whom it means; zeros in a bare host:port, which means whoever listens there.
  kvx_id128 incarnation;
  // Tensor-parallel rank.
  uint16_t tensor_rank;
  // Tensor-parallel ranks.
  uint16_t tensor_size;
  // Pipeline-parallel rank.
  uint16_t pipeline_rank;
  // Pipeline-parallel ranks.
  uint16_t pipeline_size;
} kvx_address_info;

// Settings of endpoints to be created. Used once or several times; freed by kvx_config_free.
typedef uint64_t kvx_config;

// One process's half of the library, usually one tensor-parallel rank. Freed by kvx_endpoint_destroy.
typedef uint64_t kvx_endpoint;

// How a session with a peer stands.
typedef uint32_t kvx_peer_state;

// What is known of a peer. Texts end with a NUL and are cut where they do not fit.
typedef struct {
  // Set by the library, to the element size that the caller gave.
  uint32_t struct_size;
  // How its session stands.
  kvx_peer_state state;
  // Who.
  kvx_id128 incarnation;
  // Of a lost peer: the KVX_ERR_... code.
  kvx_status error;
  // 0.
  uint32_t reserved;
  // Its label.
  char name[264];
  // The transport taken; empty if none yet.
  char transport[40];
  // Where it listens, as text; empty until it has said so.
  char address[128];
  // Why it is interrupted or lost.
  char why[512];
} kvx_peer;

// What the blocks of a cache group hold.
typedef uint32_t kvx_group_kind;

// The type of one element of the cache.
typedef uint32_t kvx_dtype;

// How a cache group is divided among the ranks of its engine.
typedef uint32_t kvx_sharding;

// A cache group: planes that share a block table.
typedef struct {
  // sizeof(kvx_group_spec), the same in every element.
  uint32_t struct_size;
  // What its blocks hold.
  kvx_group_kind kind;
  // A label for messages, at most 128 bytes.
  const char *name;
  // Blocks in each of its planes.
  uint32_t blocks;
  // Element type. Not read for states.
  kvx_dtype dtype;
  // Tokens in one block. Not read for states.
  uint32_t tokens_per_block;
  // Kv heads of the whole model. For states: in how many parts ranks may divide them (0: not at all). Not read for rows.
  uint32_t kv_heads;
  // Elements of one head of one token; of one row. Not read for states.
  uint32_t head_size;
  // The same of V, where it differs from K (0: it does not).
  uint32_t value_head_size;
  // How it is divided among ranks.
  kvx_sharding sharding;
  // This rank.
  uint16_t rank;
  // Of how many (0 stands for 1).
  uint16_t size;
  // Tokens that its attention looks back, if it is a sliding window (0: it is not).
  uint32_t window;
  // 0.
  uint32_t reserved;
} kvx_group_spec;

// What a plane's blocks hold.
typedef uint32_t kvx_plane_kind;

// An axis inside a block. A plane's order names them from the outermost inwards.
typedef uint32_t kvx_axis;

// A plane: an array of blocks at a constant stride in a region. What is 0 follows from the group: blocks lie one after
// another and hold all of the rank's heads in the usual order (token, head, dim).
typedef struct {
  // sizeof(kvx_plane_spec), the same in every element.
  uint32_t struct_size;
  // What its blocks hold.
  kvx_plane_kind kind;
  // The layer's id, at most 128 bytes: layers of two pools match by it.
  const char *layer;
  // The cache group, as an index in the groups.
  uint32_t group;
  // The region it lies in.
  uint32_t region;
  // 1 if base is given; 0: it begins where the last plane of its region ended.
  uint32_t has_base;
  // Axes in order; 0: the usual order of its kind.
  uint32_t order_count;
  // Offset of block 0 in the region, in bytes.
  uint64_t base;
  // Bytes from one block to the next; 0: the block length.
  uint64_t stride;
  // Bytes of one block. Needed for states only; for others it is checked.
  uint64_t block_length;
  // The first head it holds, counted over the whole model.
  uint32_t first_head;
  // One past the last head it holds; 0: all of the rank's.
  uint32_t head_end;
  // The axes inside a block, outermost first.
  kvx_axis order[4];
} kvx_plane_spec;

// A layout to be made. kvx_layout_create reads it and keeps nothing of it.
typedef struct {
  // sizeof(kvx_layout_spec).
  uint32_t struct_size;
  // 1 if planes of different groups may overlap, a block id belonging to one group at a time.
  uint32_t shared_blocks;
  // The cache groups.
  const kvx_group_spec *groups;
  // How many.
  size_t group_count;
  // The planes.
  const kvx_plane_spec *planes;
  // How many.
  size_t plane_count;
  // Bytes of each region; 0 in it, and null: as many as its planes need.
  const uint64_t *region_lengths;
  // How many.
  size_t region_count;
} kvx_layout_spec;

// What a pool's memory means: groups, planes, layers. Checked once, when it is made. Freed by kvx_layout_free.
typedef uint64_t kvx_layout;

// How a model preset's planes lie in memory.
typedef uint32_t kvx_arrangement;

// The layout of one rank of a model that is known by name.
typedef struct {
  // sizeof(kvx_preset_spec).
  uint32_t struct_size;
  // How its planes lie in memory.
  kvx_arrangement arrangement;
  // The model: "llama-3.1-70b", ... An unknown name's message lists them.
  const char *model;
  // Models of one's own as TOML text, in the form of the presets' file, to find the model in; null: the presets.
  const char *models_toml;
  // This tensor-parallel rank.
  uint16_t tensor_rank;
  // Of how many (0 stands for 1).
  uint16_t tensor_size;
  // Tokens in one block.
  uint32_t tokens_per_block;
  // Blocks in each group.
  uint32_t blocks;
  // 1: head, token, dim inside a block; 0: token, head, dim.
  uint32_t heads_first;
  // The first layer wanted, such as of a pipeline stage.
  uint32_t first_layer;
  // One past the last layer wanted; 0: all.
  uint32_t layer_end;
} kvx_preset_spec;

// What a layout has.
typedef struct {
  // sizeof(kvx_layout_info), set by the caller.
  uint32_t struct_size;
  // Cache groups.
  uint32_t groups;
  // Planes.
  uint32_t planes;
  // Layers.
  uint32_t layers;
  // Regions.
  uint32_t regions;
  // 1 if planes of different groups may overlap.
  uint32_t shared_blocks;
  // A hash of everything declared in the geometry: equal on equal declarations.
  uint64_t geometry_hash;
} kvx_layout_info;

// What a plane is.
typedef struct {
  // sizeof(kvx_plane_info), set by the caller.
  uint32_t struct_size;
  // What its blocks hold.
  kvx_plane_kind kind;
  // Its layer, as an index in the layout's layers.
  uint32_t layer;
  // Its cache group.
  uint32_t group;
  // The region it lies in.
  uint32_t region;
  // Blocks.
  uint32_t blocks;
  // Offset of block 0 in the region, in bytes.
  uint64_t base;
  // Bytes from one block to the next.
  uint64_t stride;
  // Bytes of one block.
  uint64_t block_length;
} kvx_plane_info;

// The kind of memory a region is in.
typedef uint32_t kvx_memory;

// Told once when the library has let go of a region's memory: it may be freed or unmapped then. Called on any thread,
// perhaps while a lock is held: it must return soon, must not throw, and every kvx_ call from inside it is refused.
typedef void (*kvx_release)(void *data);

// A contiguous range of the application's memory.
typedef struct {
  // sizeof(kvx_region_spec), the same in every element.
  uint32_t struct_size;
  // The kind of memory.
  kvx_memory memory;
  // First byte.
  void *address;
  // Bytes.
  uint64_t length;
  // Told when the memory is let go; null: nobody. Not called if the call that registers it fails.
  kvx_release release;
  // Passed to release.
  void *release_data;
  // Of memory of a device: one more than the number that CUDA has for the device in this process, if it is to be
  // checked; 0: whichever device the memory is of.
  uint32_t device;
  // 0.
  uint32_t reserved;
} kvx_region_spec;

// What peers may do with a pool.
typedef uint32_t kvx_role;

// Memory with a layout, known to an endpoint's transports and told to its peers. Freed by kvx_pool_free.
typedef uint64_t kvx_pool;

// A region of a pool.
typedef struct {
  // Set by the library or the caller, as the function says.
  uint32_t struct_size;
  // The kind of memory.
  kvx_memory memory;
  // First byte.
  void *address;
  // Bytes.
  uint64_t length;
} kvx_region_info;

// A kvx_offer, kvx_claim, kvx_grant_handle or kvx_transfer: something that goes on and ends once.
typedef uint64_t kvx_handle;

// How a handle stands, or how it ended.
typedef struct {
  // sizeof(kvx_result), set by the caller.
  uint32_t struct_size;
  // KVX_PENDING while it is open; KVX_OK if it ended well; or the KVX_ERR_... code of what ended it.
  kvx_status status;
  // 1 if repeating the operation later can succeed without a change by the caller.
  uint32_t retryable;
  // What is known of the destination blocks. While the handle is open: KVX_DESTINATION_QUARANTINED, do not reuse them.
  kvx_destination destination;
  // Bytes placed (or read, for a grant to read). 0 for offers.
  uint64_t bytes;
  // Bytes of the message that came with the arrival; 0 if there is none.
  uint64_t message_length;
  // Of an offer: claims that were served, each with a verdict.
  uint64_t members;
} kvx_result;

// How one claim of an offer ended.
typedef struct {
  // Set by the library, to the element size that the caller gave.
  uint32_t struct_size;
  // KVX_OK: the bytes are in place. Or the code of what ended it; KVX_ERR_UNKNOWN: its owner does not remember.
  kvx_status status;
  // The claimant.
  kvx_id128 peer;
  // Its claim set.
  kvx_id128 set;
  // Its number in the set.
  uint32_t member;
  // What is known of its blocks.
  kvx_destination destination;
} kvx_member;

// Options of an offer. All zeros are the defaults.
typedef struct {
  // sizeof(kvx_offer_options).
  uint32_t struct_size;
  // Claim sets served before the offer is released (0 stands for 1). One more gets KVX_ERR_ALREADY_CLAIMED.
  uint32_t readers;
  // Ends the offer with KVX_ERR_UNCLAIMED if no claim came by then, KVX_ERR_DEADLINE_EXCEEDED if one did. 0: the
  // configuration's deadlines.unmatched_ms, until a claim comes.
  uint64_t deadline_ms;
  // 0 to 255; higher goes first.
  uint32_t priority;
  // 1: compute and check a checksum of the payload.
  uint32_t checksum;
  // 1: tell its events, with event_data.
  uint32_t events;
  // 0.
  uint32_t reserved;
  // The application's number in its events.
  uint64_t event_data;
} kvx_offer_options;

// A request's KV, offered to whoever claims its key. A kvx_handle.
typedef uint64_t kvx_offer;

// The tokens first_token to token_end (exclusive) of a request in one cache group, and the blocks that hold them, in
// token order. A group of states has one block and tokens 0 to 0; no blocks and no tokens say that nothing is meant.
// A selection is an array of these, one per cache group of the pool. This struct never changes.
typedef struct {
  // First token meant, counted in the request.
  uint32_t first_token;
  // One past the last token meant.
  uint32_t token_end;
  // The blocks.
  const uint32_t *blocks;
  // How many.
  size_t block_count;
} kvx_group_selection;

// A part of an offer, released for sending.
typedef struct {
  // sizeof(kvx_part), the same in every element.
  uint32_t struct_size;
  // First token.
  uint32_t first_token;
  // The offer.
  kvx_offer offer;
  // One past the last token.
  uint32_t token_end;
  // First layer, as an index in the pool's layers.
  uint32_t first_layer;
  // One past the last layer; 0, with first_layer 0: all layers.
  uint32_t layer_end;
  // 0.
  uint32_t reserved;
} kvx_part;

// Options of a claim. All zeros are the defaults.
typedef struct {
  // sizeof(kvx_claim_options).
  uint32_t struct_size;
  // 1: this endpoint asks for the bytes, part by part, and has them validated, instead of being sent them.
  uint32_t pull;
  // The claim set, the same for all ranks of one reader; zeros: a set of its own.
  kvx_id128 set;
  // This claim's number in its set, from 0.
  uint16_t member;
  // How many endpoints of the set contact each offer (0 stands for 1).
  uint16_t members;
  // 1: tell its events, with event_data.
  uint32_t events;
  // Ends the claim with KVX_ERR_UNCLAIMED if nothing met it by then, KVX_ERR_DEADLINE_EXCEEDED if something did. 0: the
  // configuration's deadlines.unmatched_ms, until it is met.
  uint64_t deadline_ms;
  // The application's number in its events.
  uint64_t event_data;
} kvx_claim_options;

// A request's KV, wanted from the endpoints that offer its key. A kvx_handle.
typedef uint64_t kvx_claim;

// Kv heads, counted over the whole model. This struct never changes.
typedef struct {
  // The first head.
  uint32_t first;
  // One past the last head.
  uint32_t end;
} kvx_head_range;

// Bytes of one block of one plane: the explicit form. This struct never changes.
typedef struct {
  // Index of the plane in the layout.
  uint32_t plane;
  // The block.
  uint32_t block;
  // First byte inside the block.
  uint32_t offset;
  // Bytes.
  uint32_t length;
} kvx_descriptor;

// What a grant, push or pull covers: a selection, with the layers and heads meant; or descriptors.
typedef struct {
  // sizeof(kvx_target).
  uint32_t struct_size;
  // 0.
  uint32_t reserved;
  // The selection, one entry per cache group; null with descriptors.
  const kvx_group_selection *groups;
  // How many.
  size_t group_count;
  // The layers meant, as ascending indices in the layout's layers; null: all.
  const uint16_t *layers;
  // How many.
  size_t layer_count;
  // The heads meant, one range per cache group; null: all.
  const kvx_head_range *heads;
  // How many.
  size_t head_count;
  // Explicit pieces, moved in this order; null with a selection.
  const kvx_descriptor *descriptors;
  // How many.
  size_t descriptor_count;
} kvx_target;

// Options of a grant. All zeros are the defaults.
typedef struct {
  // sizeof(kvx_grant_options).
  uint32_t struct_size;
  // 1: tell its events, with event_data.
  uint32_t events;
  // Ends the grant with KVX_ERR_DEADLINE_EXCEEDED. 0: never.
  uint64_t deadline_ms;
  // Only this peer may use it; zeros: whoever has it.
  kvx_id128 holder;
  // The application's number in its events.
  uint64_t event_data;
} kvx_grant_options;

// The owner's side of a grant. A kvx_handle.
typedef uint64_t kvx_grant_handle;

// Permission to write (or read) exactly certain blocks of a peer's pool, once: what engines pass around. Freed by
// kvx_grant_free.
typedef uint64_t kvx_grant;

// Which way a grant's bytes go.
typedef uint32_t kvx_access;

// What a grant says.
typedef struct {
  // sizeof(kvx_grant_info), set by the caller.
  uint32_t struct_size;
  // Write or read.
  kvx_access access;
  // Its owner.
  kvx_id128 owner;
  // The owner's pool, as kvx_pool_id says there.
  uint32_t pool;
  // Its slot: with the generation and the owner, its name.
  uint32_t slot;
  // Which use of the slot.
  uint32_t generation;
  // 0.
  uint32_t reserved;
  // Hash of the pool's geometry, as kvx_layout_describe says.
  uint64_t geometry_hash;
  // Milliseconds it is good for, counted from when it was made.
  uint64_t remaining_ms;
} kvx_grant_info;

// Options of a push or a pull. All zeros are the defaults.
typedef struct {
  // sizeof(kvx_transfer_options).
  uint32_t struct_size;
  // 0 to 255; higher goes first.
  uint32_t priority;
  // Ends the transfer with KVX_ERR_DEADLINE_EXCEEDED; the grant's own deadline counts too. 0: none.
  uint64_t deadline_ms;
  // 1: compute and check a checksum of the payload.
  uint32_t checksum;
  // 1: tell its events, with event_data.
  uint32_t events;
  // The application's number in its events.
  uint64_t event_data;
  // Of a push: bytes delivered with the arrival, exactly once; null: none.
  const void *message;
  // How many, at most 64 KiB.
  size_t message_length;
  // Of a push: a CUevent (cudaEvent_t) that what writes the source was recorded before; the source is not read before it
  // has happened. Captured in the call, as kvx_offer_ready_after does. Null: none. A push that waits can be cancelled
  // at once.
  void *after;
} kvx_transfer_options;

// A push or a pull under way. A kvx_handle.
typedef uint64_t kvx_transfer;

// How a transfer's bytes go.
typedef struct {
  // sizeof(kvx_path_info), set by the caller.
  uint32_t struct_size;
  // Lanes or rails up; 0 if there is no link to the peer.
  uint32_t rails;
  // Of how many.
  uint32_t rails_configured;
  // 0.
  uint32_t reserved;
  // The transport's name, cut where it does not fit; empty if there is no link.
  char transport[40];
} kvx_path_info;

// What happened to a handle. Later versions may tell more kinds: skip those that you do not know.
typedef uint32_t kvx_event_kind;

// Something that happened to a handle that was opened with events = 1.
typedef struct {
  // Set by the library, to the element size that the caller gave.
  uint32_t struct_size;
  // What happened.
  kvx_event_kind kind;
  // The application's number from the handle's options.
  uint64_t data;
  // The handle's number, as kvx_handle_id says.
  uint64_t id;
  // Of KVX_EVENT_ENDED: KVX_OK, or the code of what ended the handle.
  kvx_status error;
  // 0.
  uint32_t reserved;
} kvx_event;

// It worked.
#define KVX_OK 0

// Not yet: the handle is still open, no event waits.
#define KVX_PENDING 1

// An argument is wrong in itself: a null pointer, a handle that was freed, a struct of an unknown size.
#define KVX_ERR_INVALID_ARGUMENT -1

// An index, offset or length lies outside what it indexes.
#define KVX_ERR_OUT_OF_BOUNDS -2

// Two pools do not describe the same cache.
#define KVX_ERR_GEOMETRY_MISMATCH -3

// The memory or pool is not registered here.
#define KVX_ERR_NOT_REGISTERED -4

// This build, machine, process or peer cannot do that.
#define KVX_ERR_UNSUPPORTED -5

// The peer did not prove who it is, or the configuration forbids it.
#define KVX_ERR_UNAUTHENTICATED -6

// What was named belongs to an earlier incarnation of the peer.
#define KVX_ERR_STALE_PEER -7

// No session with the peer was ever made.
#define KVX_ERR_UNREACHABLE -8

// The session with the peer ended and did not come back in time.
#define KVX_ERR_PEER_LOST -9

// The key's offer has ended, or is not there and will not come.
#define KVX_ERR_NOT_OFFERED -10

// No claim (or no offer) met this handle before its deadline.
#define KVX_ERR_UNCLAIMED -11

// A live offer with this key exists.
#define KVX_ERR_DUPLICATE_KEY -12

// The offer already has all the readers it was opened for.
#define KVX_ERR_ALREADY_CLAIMED -13

// The claim was ended by its owner before it was filled.
#define KVX_ERR_DECLINED -14

// Ended by a call to cancel.
#define KVX_ERR_CANCELLED -15

// The source blocks were taken back.
#define KVX_ERR_RETRACTED -16

// The deadline passed.
#define KVX_ERR_DEADLINE_EXCEEDED -17

// A configured limit is reached; it clears by itself.
#define KVX_ERR_BUSY -18

// The system or a device has no more of something.
#define KVX_ERR_RESOURCE_EXHAUSTED -19

// Bytes arrived that are not those that were sent.
#define KVX_ERR_CORRUPT -20

// A socket, queue pair or device failed.
#define KVX_ERR_TRANSPORT -21

// The peer broke the protocol.
#define KVX_ERR_PROTOCOL -22

// The endpoint or handle is closed.
#define KVX_ERR_CLOSED -23

// The outcome cannot be known any more.
#define KVX_ERR_UNKNOWN -24

// A defect of kvxfer.
#define KVX_ERR_INTERNAL -25

// No byte of them was written.
#define KVX_DESTINATION_UNTOUCHED 0

// Some bytes may have been written; none will be written any more.
#define KVX_DESTINATION_WRITTEN 1

// A device did not let go of them: they must not be reused.
#define KVX_DESTINATION_QUARANTINED 2

// A state that this header does not name.
#define KVX_PEER_OTHER 0

// The session is up.
#define KVX_PEER_READY 1

// The connection broke and is being made anew.
#define KVX_PEER_INTERRUPTED 2

// The peer takes no new work.
#define KVX_PEER_DRAINING 3

// Lost: every handle with it has ended.
#define KVX_PEER_LOST 4

// Raw bytes.
#define KVX_DTYPE_U8 1

// Eight-bit integers.
#define KVX_DTYPE_I8 2

// Eight-bit floats with four exponent bits.
#define KVX_DTYPE_F8E4M3 3

// Eight-bit floats with five exponent bits.
#define KVX_DTYPE_F8E5M2 4

// IEEE half precision.
#define KVX_DTYPE_F16 5

// Brain floats.
#define KVX_DTYPE_BF16 6

// IEEE single precision.
#define KVX_DTYPE_F32 7

// Keys and values with heads.
#define KVX_GROUP_ATTENTION 1

// Rows without heads, as in multi-head latent attention.
#define KVX_GROUP_LATENT 2

// Recurrent states: one block per request, no positions.
#define KVX_GROUP_STATE 3

// One rank holds everything.
#define KVX_SHARDING_NONE 0

// By kv heads. With more ranks than heads, neighbouring ranks hold the same head.
#define KVX_SHARDING_HEADS 1

// Every rank holds everything.
#define KVX_SHARDING_REPLICATED 2

// By tokens: reserved, KVX_ERR_UNSUPPORTED today.
#define KVX_SHARDING_TOKENS 3

// Keys.
#define KVX_PLANE_KEY 1

// Values.
#define KVX_PLANE_VALUE 2

// Keys and values in one block.
#define KVX_PLANE_FUSED 3

// Rows without heads.
#define KVX_PLANE_LATENT 4

// A recurrent state.
#define KVX_PLANE_STATE 5

// K (0) or V (1), of fused planes.
#define KVX_AXIS_KV 1

// The kv head.
#define KVX_AXIS_HEAD 2

// The token in the block.
#define KVX_AXIS_TOKEN 3

// The element in the head.
#define KVX_AXIS_DIM 4

// Alone in an order: unknown below the head. Such blocks are moved whole, between equal block sizes.
#define KVX_AXIS_PACKED 5

// One plane after another, K and V of each layer.
#define KVX_ARRANGEMENT_PER_LAYER 0

// One plane per layer, K and V in one block.
#define KVX_ARRANGEMENT_FUSED 1

// One big block holds all layers of its group.
#define KVX_ARRANGEMENT_BLOCK_MAJOR 2

// One plane per head, K and V apart.
#define KVX_ARRANGEMENT_PER_HEAD 3

// Be sent its blocks: offers, pushes from it, grants to read.
#define KVX_ROLE_SERVE 1

// Write into its blocks where a claim or grant says so.
#define KVX_ROLE_RECEIVE 2

// Both.
#define KVX_ROLE_BOTH 3

// Memory that the CPU can read and write.
#define KVX_MEMORY_HOST 0

// Memory of a CUDA device: KVX_ERR_UNSUPPORTED without a driver that can be used.
#define KVX_MEMORY_DEVICE 1

// The holder may write into the owner's blocks.
#define KVX_ACCESS_WRITE 1

// The holder may read the owner's blocks.
#define KVX_ACCESS_READ 2

// A claim met its offer at all sources, or an offer got a claim.
#define KVX_EVENT_MATCHED 1

// The offer was restarted: progress before is void.
#define KVX_EVENT_RESTARTED 2

// The handle has ended. Always its last event.
#define KVX_EVENT_ENDED 3

// A kind that this version of the interface has no number for.
#define KVX_EVENT_OTHER 0

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The version of the C interface that the library has: 1. It grows when functions or fields are added; a library works
// with programs built for a version up to its own.
uint32_t kvx_abi_version(void);

// The library's version, such as "0.1.0". Never null; not to be freed.
const char *kvx_version_string(void);

// The name of a status, such as "StalePeer" for KVX_ERR_STALE_PEER; "Ok", "Pending", or "?" for a number that is none.
// Never null; not to be freed.
const char *kvx_status_name(kvx_status status);

// 1 if repeating the operation later can succeed without a change by the caller, 0 if not (or if it is no error).
int32_t kvx_status_retryable(kvx_status status);

// The message of this thread's last failed call: what, where, why, and what to do. A call that works does not clear it.
// Empty if none failed. Gives the text's length.
int64_t kvx_last_error_message(char *buffer, size_t capacity);

// This thread's last error in numbers.
kvx_status kvx_last_error(kvx_error *error);

// Forgets this thread's last error.
void kvx_clear_last_error(void);

// Reads the text form: what kvx_address_text gave, or a bare "host:port" with a numeric host.
kvx_status kvx_address_parse(const char *text, kvx_address *address);

// Reads the byte form: what kvx_address_bytes gave.
kvx_status kvx_address_from_bytes(const void *bytes, size_t length, kvx_address *address);

// The text form, at most 127 bytes: what to publish. Gives the text's length.
int64_t kvx_address_text(kvx_address address, char *buffer, size_t capacity);

// The byte form, at most 73 bytes. Gives their number; writes them only if they all fit.
int64_t kvx_address_bytes(kvx_address address, void *buffer, size_t capacity);

// What it says.
kvx_status kvx_address_describe(kvx_address address, kvx_address_info *info);

// Frees an address.
kvx_status kvx_address_free(kvx_address address);

// The defaults with the KVXFER_... environment variables over them.
kvx_status kvx_config_create(kvx_config *config);

// The settings in this TOML text (docs/configuration.md has all keys) over the defaults. The environment is not read.
kvx_status kvx_config_from_toml(const char *text, kvx_config *config);

// The KVXFER_... environment variables over the settings in this TOML file over the defaults.
kvx_status kvx_config_load(const char *path, kvx_config *config);

// Sets one key from text, over everything before: "name" to "decode-0", "listen" to "0.0.0.0:7700", "transports" to
// "rdma,tcp", "security.off_loopback" to "insecure-allowed", "limits.slots_max" to "512". Values that contradict each
// other are found when the endpoint is created.
kvx_status kvx_config_set(kvx_config config, const char *key, const char *value);

// Says where the endpoint stands in its engine: its ranks, and how many there are (at least 1 each).
kvx_status kvx_config_set_rank(kvx_config config,
                               uint16_t tensor_rank,
                               uint16_t tensor_size,
                               uint16_t pipeline_rank,
                               uint16_t pipeline_size);

// Checks all settings together, as kvx_endpoint_create does.
kvx_status kvx_config_check(kvx_config config);

// Every key with its environment variable, default, range and meaning, as a Markdown table. Gives the text's length.
int64_t kvx_config_reference(char *buffer, size_t capacity);

// Frees a config. Endpoints made from it are not touched.
kvx_status kvx_config_free(kvx_config config);

// Creates an endpoint: opens its transports and its listener and starts its threads. Config 0 stands for
// kvx_config_create's.
kvx_status kvx_endpoint_create(kvx_config config, kvx_endpoint *endpoint);

// Its label. Gives the text's length.
int64_t kvx_endpoint_name(kvx_endpoint endpoint, char *buffer, size_t capacity);

// Its identity: new at every start.
kvx_status kvx_endpoint_incarnation(kvx_endpoint endpoint, kvx_id128 *incarnation);

// What to publish so that others find it: a new address handle.
kvx_status kvx_endpoint_address(kvx_endpoint endpoint, kvx_address *address);

// Makes the session and the link to a peer ahead of the first transfer. May block, up to timeout_ms. Not needed: claims,
// pushes and pulls connect by themselves.
// KVX_ERR_UNREACHABLE if nobody answers; KVX_ERR_STALE_PEER if somebody else does; KVX_ERR_TRANSPORT if no transport comes up.
kvx_status kvx_endpoint_connect(kvx_endpoint endpoint,
                                kvx_address address,
                                uint64_t timeout_ms);

// The path to a peer in words: session, transport, rails, and why better ones were not taken. Gives the text's length.
int64_t kvx_endpoint_explain(kvx_endpoint endpoint, kvx_address address, char *buffer, size_t capacity);

// What is known of peers with a session, and of those lost lately: at most capacity elements of element_size bytes
// (sizeof(kvx_peer)), and in count how many there are.
kvx_status kvx_endpoint_peers(kvx_endpoint endpoint,
                              kvx_peer *peers,
                              size_t element_size,
                              size_t capacity,
                              size_t *count);

// Counters, gauges and histograms as Prometheus text; docs/metrics.md defines them. Gives the text's length.
int64_t kvx_endpoint_metrics(kvx_endpoint endpoint, char *buffer, size_t capacity);

// Takes no new work, tells peers so, and waits until what is open has ended. May block, up to timeout_ms.
// KVX_ERR_DEADLINE_EXCEEDED with the number of handles that are still open; they go on.
kvx_status kvx_endpoint_drain(kvx_endpoint endpoint, uint64_t timeout_ms);

// Ends every handle with KVX_ERR_CLOSED, tells peers, and stops all threads. May block, up to timeout_ms, for what may
// still write the application's memory. The handle stays: results can still be read. A second call does nothing.
// KVX_ERR_DEADLINE_EXCEEDED if something still may: the endpoint is closed all the same, and the handles concerned ended
// with KVX_DESTINATION_QUARANTINED.
kvx_status kvx_endpoint_close(kvx_endpoint endpoint,
                              uint64_t timeout_ms);

// Closes an endpoint as kvx_endpoint_close does, and frees it, whatever the status is (unless it was no endpoint). May
// block, up to timeout_ms. Its pools, offers, claims, grants and transfers keep their handles, to be freed as ever.
kvx_status kvx_endpoint_destroy(kvx_endpoint endpoint, uint64_t timeout_ms);

// Makes a layout, group by group and plane by plane. Errors name the group or plane and the field.
kvx_status kvx_layout_create(const kvx_layout_spec *spec, kvx_layout *layout);

// A layout of blocks of raw bytes in one region: one group, one plane, layer "0". What selections call tokens are
// blocks then.
kvx_status kvx_layout_opaque(uint32_t block_bytes, uint32_t blocks, kvx_layout *layout);

// The layout of one rank of a model that is known by name, in one region.
kvx_status kvx_layout_preset(const kvx_preset_spec *spec, kvx_layout *layout);

// What it has.
kvx_status kvx_layout_describe(kvx_layout layout, kvx_layout_info *info);

// The id of a layer. Gives the text's length.
int64_t kvx_layout_layer_name(kvx_layout layout, uint32_t layer, char *buffer, size_t capacity);

// The index of the layer with this id. KVX_ERR_OUT_OF_BOUNDS if there is none.
kvx_status kvx_layout_layer_index(kvx_layout layout, const char *name, uint32_t *layer);

// Bytes that a region must have.
kvx_status kvx_layout_region_length(kvx_layout layout, uint32_t region, uint64_t *length);

// What a plane is.
kvx_status kvx_layout_plane(kvx_layout layout, uint32_t plane, kvx_plane_info *info);

// Frees a layout. Pools made with it are not touched.
kvx_status kvx_layout_free(kvx_layout layout);

// Makes memory of the application's known as a pool: one region for each that the layout declares, in its order.
// From now until release is called (or, without one, until every handle on the pool has ended and the pool is closed or
// freed) the memory must stay where it is. Blocks that a handle names must not be written (or, at the receiver, read)
// until that handle has ended; after KVX_DESTINATION_QUARANTINED they must not be reused at all.
// If this fails, nothing was kept, and release is not called.
kvx_status kvx_pool_register(kvx_endpoint endpoint,
                             kvx_layout layout,
                             const kvx_region_spec *regions,
                             size_t region_count,
                             kvx_role role,
                             kvx_pool *pool);

// A pool in zeroed host memory of the library's own, of the sizes that the layout declares.
kvx_status kvx_pool_allocate(kvx_endpoint endpoint, kvx_layout layout, kvx_role role, kvx_pool *pool);

// Its layout: a new layout handle.
kvx_status kvx_pool_layout(kvx_pool pool, kvx_layout *layout);

// Where a region of it is. The caller sets struct_size. Blocks that a handle names must not be touched there until it
// has ended.
kvx_status kvx_pool_region(kvx_pool pool, uint32_t region, kvx_region_info *info);

// Where all regions of it are: at most capacity elements of element_size bytes (sizeof(kvx_region_info)), and in count
// how many there are.
kvx_status kvx_pool_regions(kvx_pool pool,
                            kvx_region_info *regions,
                            size_t element_size,
                            size_t capacity,
                            size_t *count);

// The number that peers know it by, and its role. Null where it is not wanted.
// KVX_ERR_NOT_REGISTERED while it is suspended, KVX_ERR_CLOSED after its end.
kvx_status kvx_pool_id(kvx_pool pool, uint32_t *id, kvx_role *role);

// Copies bytes into a block of a plane, from offset on.
kvx_status kvx_pool_copy_in(kvx_pool pool,
                            uint32_t plane,
                            uint32_t block,
                            uint32_t offset,
                            const void *bytes,
                            size_t length);

// Copies bytes of a block of a plane out, from offset on.
kvx_status kvx_pool_copy_out(kvx_pool pool,
                             uint32_t plane,
                             uint32_t block,
                             uint32_t offset,
                             void *bytes,
                             size_t length);

// Takes the pool out of use. The handle stays, to be freed.
// KVX_ERR_BUSY while a handle or a kept verdict refers to it; it stays usable then. KVX_ERR_BUSY also while other
// endpoints on this host have its GPU memory mapped: it is out of use then, they have been told to let go, and the memory
// must stay until another call says KVX_OK (mostly within milliseconds).
kvx_status kvx_pool_close(kvx_pool pool);

// As kvx_pool_close, waiting for what refers to the pool to end. May block, up to timeout_ms.
kvx_status kvx_pool_close_wait(kvx_pool pool, uint64_t timeout_ms);

// Takes the pool out of use for a while, so that its memory may be remapped: until kvx_pool_resume nothing of it is read
// or written. KVX_ERR_BUSY while a handle refers to it, and while other endpoints on this host have its GPU memory mapped, as
// with kvx_pool_close: call it again then.
kvx_status kvx_pool_suspend(kvx_pool pool);

// Puts a suspended pool into use again, with the same layout at the same addresses.
kvx_status kvx_pool_resume(kvx_pool pool);

// Frees the handle, at once. The pool itself goes, and release is called, once no open handle refers to it.
kvx_status kvx_pool_free(kvx_pool pool);

// How the handle stands, without waiting: KVX_PENDING while it is open, KVX_OK if it ended well, or the code of what
// ended it, whose message is then this thread's last error too. The result says more; null if it is not wanted.
kvx_status kvx_handle_poll(kvx_handle handle, kvx_result *result);

// As kvx_handle_poll, waiting for the end. May block, up to timeout_ms; KVX_PENDING if it is still open then: nothing may
// be concluded about its blocks, and waiting again is right.
kvx_status kvx_handle_wait(kvx_handle handle,
                           uint64_t timeout_ms,
                           kvx_result *result);

// The message of what ended the handle: what, where, why, and what to do. Empty while it is open, and if it ended well.
// Gives the text's length.
int64_t kvx_handle_error(kvx_handle handle, char *buffer, size_t length);

// The message that came with the arrival of a grant. Gives its length, 0 if there is none (yet); writes it only if it
// all fits.
int64_t kvx_handle_message(kvx_handle handle, void *buffer, size_t capacity);

// The verdicts of an offer's claims, once it was released: at most capacity elements of element_size bytes
// (sizeof(kvx_member)), and in count how many there are.
kvx_status kvx_handle_members(kvx_handle handle,
                              kvx_member *members,
                              size_t element_size,
                              size_t capacity,
                              size_t *count);

// The message of the error in one of these verdicts; empty if the bytes are in place. Gives the text's length.
int64_t kvx_handle_member_error(kvx_handle handle, uint32_t index, char *buffer, size_t capacity);

// Ends it with KVX_ERR_CANCELLED (no effect once it has ended). Does not wait: its blocks may be reused once the handle
// has ended, which takes a round trip at most while the peer lives.
kvx_status kvx_handle_cancel(kvx_handle handle);

// Frees the handle and lets what it stands for go on.
kvx_status kvx_handle_detach(kvx_handle handle);

// What an open handle waits for (offer, blocks, credit, rail, peer, ...), and in waited_ns for how long, in nanoseconds
// (null if it is not wanted). Empty once it has ended. Gives the text's length.
int64_t kvx_handle_waiting_on(kvx_handle handle, char *buffer, size_t capacity, uint64_t *waited_ns);

// The number that its events carry.
kvx_status kvx_handle_id(kvx_handle handle, uint64_t *id);

// Frees the handle, at once. An open one is cancelled, and nobody learns when its blocks may be reused: to learn it,
// cancel, wait for the end, then free.
kvx_status kvx_handle_free(kvx_handle handle);

// Offers a request's KV under a key of at most 256 bytes, before or after it is claimed.
// KVX_ERR_DUPLICATE_KEY if a live offer has the key; KVX_ERR_BUSY at a limit. Options may be null.
kvx_status kvx_offer_open(kvx_endpoint endpoint,
                          const void *key,
                          size_t key_length,
                          kvx_pool pool,
                          const kvx_offer_options *options,
                          kvx_offer *offer);

// Appends blocks: in each cache group, tokens go on where the last append ended. Where the last block was not full, its
// id comes first again.
kvx_status kvx_offer_append(kvx_offer offer, const kvx_group_selection *groups, size_t group_count);

// Releases a part for sending: these tokens of these layers (indices in the pool's layers; 0 to 0 stands for all). Its
// bytes are final now.
kvx_status kvx_offer_ready(kvx_offer offer,
                           uint32_t first_token,
                           uint32_t token_end,
                           uint32_t first_layer,
                           uint32_t layer_end);

// As kvx_offer_ready, for bytes that kernels are still to write: event is a CUevent (cudaEvent_t) recorded behind them.
// Everything is checked now, and the part is read once the event has happened. The event is captured as it is in this
// call: it may be recorded again or destroyed afterwards. No stream and no device is waited for. One that fails ends the
// offer. KVX_ERR_INVALID_ARGUMENT for null and inside a stream capture, KVX_ERR_UNSUPPORTED without a CUDA driver.
kvx_status kvx_offer_ready_after(kvx_offer offer,
                                 uint32_t first_token,
                                 uint32_t token_end,
                                 uint32_t first_layer,
                                 uint32_t layer_end,
                                 void *event);

// kvx_offer_ready for a whole step of several requests of one endpoint, with one look at the control plane. Stops at the
// first refusal: parts before it are released, those after it are not.
kvx_status kvx_ready_many(kvx_endpoint endpoint,
                          const kvx_part *parts,
                          size_t part_count);

// kvx_ready_many with one event for the whole step, as kvx_offer_ready_after takes it.
kvx_status kvx_ready_many_after(kvx_endpoint endpoint, const kvx_part *parts, size_t part_count, void *event);

// No more blocks come: the request has token_end tokens. What has not been released is now, with the state blocks.
kvx_status kvx_offer_finish(kvx_offer offer, uint32_t token_end);

// As kvx_offer_finish, and what it releases, state blocks included, waits for the event, as kvx_offer_ready_after takes it.
// What was released before keeps to its own.
kvx_status kvx_offer_finish_after(kvx_offer offer,
                                  uint32_t token_end,
                                  void *event);

// Voids all progress: bytes of earlier attempts never count. Blocks are appended anew. Those of earlier attempts may be
// overwritten once kvx_offer_voided says so.
kvx_status kvx_offer_restart(kvx_offer offer);

// KVX_OK if no block of an earlier attempt is being read any more, KVX_PENDING if one is: a few milliseconds at most.
kvx_status kvx_offer_voided(kvx_offer offer);

// Takes blocks back: when this returns, nothing read from them later counts, and they may be reused. The offer ends with
// KVX_ERR_RETRACTED. May block for reads that are inside a system call, at most for the configuration's
// deadlines.retract_ms_max (100 ms if it does not say): KVX_ERR_DEADLINE_EXCEEDED then, and the blocks must not be reused
// until the offer has ended.
kvx_status kvx_offer_retract(kvx_offer offer,
                             const uint32_t *blocks,
                             size_t block_count);

// Claims a request's KV from all endpoints that hold some of it, before or after they offer it. The library finds out
// which of them sends what. Options may be null. What peers say ends the claim.
kvx_status kvx_claim_open(kvx_endpoint endpoint,
                          const void *key,
                          size_t key_length,
                          kvx_pool pool,
                          const kvx_address *sources,
                          size_t source_count,
                          const kvx_claim_options *options,
                          kvx_claim *claim);

// Says where the bytes go: per cache group the tokens wanted and the blocks for them. Tokens that are held already are
// simply not selected. Once per claim.
kvx_status kvx_claim_fill(kvx_claim claim, const kvx_group_selection *groups, size_t group_count);

// Ends the claim before it is filled: KVX_ERR_DECLINED at both sides. No effect after that.
kvx_status kvx_claim_decline(kvx_claim claim);

// Lets a CUDA stream (CUstream, cudaStream_t; null is the default stream) wait, from its present end on, until the claim
// has ended: arrived or not, which kvx_handle_poll says. Kernels queued behind it read the blocks after the arrival. The
// stream goes on at the claim's deadline and when the endpoint is closed, too. What makes the claim end must not be queued
// behind it. KVX_ERR_INVALID_ARGUMENT inside a stream capture; KVX_ERR_UNSUPPORTED without a CUDA driver that can do it;
// KVX_ERR_BUSY if too many streams wait.
kvx_status kvx_claim_hold_stream(kvx_claim claim,
                                 void *stream);

// Permits a peer to write exactly these blocks, once. Options may be null.
kvx_status kvx_pool_grant(kvx_pool pool,
                          const kvx_target *blocks,
                          const kvx_grant_options *options,
                          kvx_grant_handle *handle);

// Permits a peer to read exactly these blocks, once. They must hold until the handle has ended. Options may be null.
kvx_status kvx_pool_serve(kvx_pool pool,
                          const kvx_target *blocks,
                          const kvx_grant_options *options,
                          kvx_grant_handle *handle);

// What to hand to the peer that shall use it: a new grant handle for this process; kvx_grant_bytes makes it portable.
kvx_status kvx_grant_handle_grant(kvx_grant_handle handle, kvx_grant *grant);

// The portable form. Gives the number of bytes; writes them only if they all fit.
int64_t kvx_grant_bytes(kvx_grant grant, void *buffer, size_t capacity);

// Reads the portable form. What comes from elsewhere is checked here, and again by its owner when it is used.
kvx_status kvx_grant_parse(const void *bytes, size_t length, kvx_grant *grant);

// What it says.
kvx_status kvx_grant_describe(kvx_grant grant, kvx_grant_info *info);

// Frees a grant: this process's copy of the permission, not the permission itself.
kvx_status kvx_grant_free(kvx_grant grant);

// Writes blocks of ours into the blocks of a grant, with a message if the options have one. Options may be null.
kvx_status kvx_push(kvx_endpoint endpoint,
                    kvx_pool pool,
                    const kvx_target *source,
                    kvx_grant grant,
                    const kvx_transfer_options *options,
                    kvx_transfer *transfer);

// Reads the blocks of a grant to read into blocks of ours. Options may be null; they have no message.
kvx_status kvx_pull(kvx_endpoint endpoint,
                    kvx_grant grant,
                    kvx_pool pool,
                    const kvx_target *destination,
                    const kvx_transfer_options *options,
                    kvx_transfer *transfer);

// How its bytes go, in numbers.
kvx_status kvx_transfer_path_info(kvx_transfer transfer, kvx_path_info *info);

// The way its bytes take, in words: transport and rails, one line each. Empty while there is no link to the peer. Gives
// the text's length.
int64_t kvx_transfer_path(kvx_transfer transfer, char *buffer, size_t capacity);

// Takes up to capacity events, oldest first, into elements of element_size bytes (sizeof(kvx_event)), and says in count
// how many. KVX_OK even if there were none. All threads drain the same queue; an event is told once.
kvx_status kvx_events_drain(kvx_endpoint endpoint,
                            kvx_event *events,
                            size_t element_size,
                            size_t capacity,
                            size_t *count);

// A descriptor that polls readable while events wait, for poll, epoll and the like. It belongs to the endpoint: do not
// read or close it, and take it out of your poller before the endpoint is destroyed.
kvx_status kvx_events_fd(kvx_endpoint endpoint, int *fd);

// Waits until an event waits to be drained. May block, up to timeout_ms; KVX_PENDING if none came.
kvx_status kvx_events_wait(kvx_endpoint endpoint, uint64_t timeout_ms);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* KVXFER_H */
