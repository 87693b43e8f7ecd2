//! Handles, and the table of the objects behind them.
//!
//! A handle is a number: kind (8 bits), generation (32 bits), place (24 bits). The generation of a place grows whenever
//! its object goes, so a handle that was freed is never taken for one made later. A look-up is one uncontended lock of
//! a shard and one reference counted up, so that freeing an object under another thread's call is safe.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvxfer::{Claim, Endpoint, EndpointAddress, Error, ErrorKind, Grant, GrantHandle, Offer, Pool, Result, Transfer};
use parking_lot::RwLock;

use crate::config::Settings;
use crate::handle::Held;
use crate::layout::Layout;

/// Shards: threads that create and free handles rarely meet.
const SHARDS: usize = 16;
const PLACE_BITS: u32 = 24;
const GENERATION_BITS: u32 = 32;
const PLACES_PER_SHARD: usize = (1 << PLACE_BITS) / SHARDS;

/// An object that has a handle.
pub(crate) trait Kind: Sized {
    /// The handle's top byte. Fixed for ever; 0 is none.
    const NUMBER: u8;
    /// What users call it.
    const NAME: &'static str;
    fn hold(this: Arc<Self>) -> Object;
    fn held(object: &Object) -> Option<&Arc<Self>>;
}

macro_rules! kinds {
    ($($number:literal $variant:ident($type:ty) $name:literal,)*) => {
        /// What a place of the table holds.
        pub(crate) enum Object {
            $($variant(Arc<$type>),)*
        }

        $(impl Kind for $type {
            const NUMBER: u8 = $number;
            const NAME: &'static str = $name;
            fn hold(this: Arc<Self>) -> Object {
                Object::$variant(this)
            }
            fn held(object: &Object) -> Option<&Arc<Self>> {
                match object {
                    Object::$variant(this) => Some(this),
                    _ => None,
                }
            }
        })*

        fn name(kind: u8) -> Option<&'static str> {
            match kind {
                $($number => Some($name),)*
                _ => None,
            }
        }
    };
}

kinds! {
    1 Config(Settings) "config",
    2 Address(EndpointAddress) "address",
    3 Layout(Layout) "layout",
    4 Endpoint(Endpoint) "endpoint",
    5 Pool(Pool) "pool",
    6 Offer(Held<Offer>) "offer",
    7 Claim(Held<Claim>) "claim",
    8 GrantHandle(Held<GrantHandle>) "grant handle",
    9 Grant(Grant) "grant",
    10 Transfer(Held<Transfer>) "transfer",
}

/// Apart by a cache line, so that a lock taken in one does not slow another.
#[repr(align(64))]
struct Shard(RwLock<Places>);

struct Places {
    all: Vec<Place>,
    free: Vec<usize>,
}

struct Place {
    /// Of the object that is here, or of the one that comes next.
    generation: u32,
    object: Option<Object>,
}

static TABLE: [Shard; SHARDS] = [const {
    Shard(RwLock::new(Places {
        all: Vec::new(),
        free: Vec::new(),
    }))
}; SHARDS];

/// The shard that this thread's new handles go to.
fn own_shard() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static OWN: Cell<usize> = const { Cell::new(usize::MAX) };
    }
    OWN.with(|own| {
        if own.get() == usize::MAX {
            own.set(NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS);
        }
        own.get()
    })
}

/// A handle's parts.
struct Parts {
    kind: u8,
    generation: u32,
    shard: usize,
    position: usize,
}

impl Parts {
    fn of(handle: u64) -> Parts {
        let place = (handle & ((1 << PLACE_BITS) - 1)) as usize;
        Parts {
            kind: (handle >> (PLACE_BITS + GENERATION_BITS)) as u8,
            generation: (handle >> PLACE_BITS) as u32,
            shard: place % SHARDS,
            position: place / SHARDS,
        }
    }

    fn handle(&self) -> u64 {
        let place = (self.position * SHARDS + self.shard) as u64;
        u64::from(self.kind) << (PLACE_BITS + GENERATION_BITS) | u64::from(self.generation) << PLACE_BITS | place
    }
}

/// A handle for an object.
///
/// # Errors
/// `ResourceExhausted` with about 16 million handles.
pub(crate) fn insert<T: Kind>(object: T) -> Result<u64> {
    let shard = own_shard();
    let object = T::hold(Arc::new(object));
    let mut places = TABLE[shard].0.write();
    let position = match places.free.pop() {
        Some(position) => position,
        None if places.all.len() < PLACES_PER_SHARD => {
            places.all.push(Place {
                generation: 1,
                object: None,
            });
            places.all.len() - 1
        }
        None => {
            drop(places);
            return Err(
                Error::new(ErrorKind::ResourceExhausted, format!("another {} handle", T::NAME))
                    .because(format!("this thread's shard has {PLACES_PER_SHARD} live handles"))
                    .remedy("free the handles that are not needed any more"),
            );
        }
    };
    let place = &mut places.all[position];
    place.object = Some(object);
    Ok(Parts {
        kind: T::NUMBER,
        generation: place.generation,
        shard,
        position,
    }
    .handle())
}

/// The object behind a handle.
///
/// # Errors
/// `InvalidArgument` for 0, a handle of another kind, one that was freed, and numbers that never were handles.
pub(crate) fn get<T: Kind>(handle: u64) -> Result<Arc<T>> {
    let parts = Parts::of(handle);
    if parts.kind == T::NUMBER {
        let places = TABLE[parts.shard].0.read();
        if let Some(place) = places.all.get(parts.position)
            && place.generation == parts.generation
            && let Some(object) = place.object.as_ref().and_then(T::held)
        {
            return Ok(Arc::clone(object));
        }
    }
    Err(refused::<T>(handle))
}

/// Takes an object out of the table: its handle is stale from now on.
///
/// # Errors
/// As [`get`].
pub(crate) fn remove<T: Kind>(handle: u64) -> Result<Arc<T>> {
    let parts = Parts::of(handle);
    if parts.kind == T::NUMBER {
        let mut places = TABLE[parts.shard].0.write();
        if let Some(place) = places.all.get_mut(parts.position)
            && place.generation == parts.generation
            && let Some(object) = place.object.as_ref().and_then(T::held).map(Arc::clone)
        {
            // The table's own reference goes after the lock: what it ends may take long.
            let own = place.object.take();
            // A place whose generations are used up is given up, so that none ever comes again.
            if let Some(next) = place.generation.checked_add(1) {
                place.generation = next;
                places.free.push(parts.position);
            }
            drop(places);
            drop(own);
            return Ok(object);
        }
    }
    Err(refused::<T>(handle))
}

/// The kind that a handle says it has.
pub(crate) fn kind_of(handle: u64) -> u8 {
    Parts::of(handle).kind
}

/// Handles that are live, for tests.
#[cfg(test)]
fn live() -> usize {
    let count = |shard: &Shard| shard.0.read().all.iter().filter(|place| place.object.is_some()).count();
    TABLE.iter().map(count).sum()
}

#[cold]
fn refused<T: Kind>(handle: u64) -> Error {
    not_a_handle(T::NAME, T::NUMBER, handle)
}

/// Why a number is not the handle that was wanted; `wanted` is what it should be, `number` its kind (0: one of several).
#[cold]
pub(crate) fn not_a_handle(wanted: &str, number: u8, handle: u64) -> Error {
    let kind = kind_of(handle);
    let error = Error::new(
        ErrorKind::InvalidArgument,
        format!("{handle:#x} as {} handle", article(wanted)),
    );
    if handle == 0 {
        return error
            .because("0 is never a handle")
            .remedy("pass what the call that made it wrote; check that call's status");
    }
    match name(kind) {
        Some(_) if kind == number => error
            .because("it was freed, or it comes from another process")
            .remedy("use handles of this process until they are freed, and not after"),
        Some(other) => error
            .because(format!("it is {} handle", article(other)))
            .remedy(format!("pass {} handle", article(wanted))),
        None => error
            .because("no handle looks like that")
            .remedy("pass what the call that made it wrote, unchanged"),
    }
}

fn article(name: &str) -> String {
    let name = name.strip_suffix(" handle").unwrap_or(name);
    let article = if name.starts_with(['a', 'e', 'i', 'o', 'u']) {
        "an"
    } else {
        "a"
    };
    format!("{article} {name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address() -> EndpointAddress {
        "127.0.0.1:7700".parse().unwrap()
    }

    fn why(result: Result<Arc<EndpointAddress>>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn freed_wrong_and_invented_handles_are_told_apart() {
        let handle = insert(address()).unwrap();
        assert_eq!(*get::<EndpointAddress>(handle).unwrap(), address());
        let error = get::<Endpoint>(handle).unwrap_err().to_string();
        assert!(error.contains("it is an address handle"), "{error}");
        remove::<EndpointAddress>(handle).unwrap();
        assert!(why(remove(handle)).contains("it was freed"));
        assert!(why(get(handle)).contains("it was freed"));
        assert!(why(get(0)).contains("0 is never a handle"));
        assert!(why(get(u64::MAX)).contains("no handle looks like that"));
        assert!(why(get(handle | 0xff_ffff)).contains("it was freed"));
    }

    #[test]
    fn a_place_is_used_again_under_another_number() {
        let first = insert(address()).unwrap();
        remove::<EndpointAddress>(first).unwrap();
        let second = insert(address()).unwrap();
        assert_eq!(first & 0xff_ffff, second & 0xff_ffff);
        assert_ne!(first, second);
        assert!(get::<EndpointAddress>(first).is_err());
        remove::<EndpointAddress>(second).unwrap();
    }

    #[test]
    fn a_place_whose_generations_are_used_up_is_given_up() {
        let handle = insert(address()).unwrap();
        let parts = Parts::of(handle);
        TABLE[parts.shard].0.write().all[parts.position].generation = u32::MAX;
        let last = Parts {
            generation: u32::MAX,
            ..parts
        }
        .handle();
        remove::<EndpointAddress>(last).unwrap();
        assert!(get::<EndpointAddress>(last).is_err());
        let next = insert(address()).unwrap();
        assert_ne!(next & 0xff_ffff, last & 0xff_ffff);
        remove::<EndpointAddress>(next).unwrap();
    }

    #[test]
    fn many_threads_make_use_and_free_handles() {
        let before = live();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..2_000 {
                        let handle = insert(address()).unwrap();
                        let kept = get::<EndpointAddress>(handle).unwrap();
                        remove::<EndpointAddress>(handle).unwrap();
                        assert!(get::<EndpointAddress>(handle).is_err());
                        assert_eq!(*kept, address());
                    }
                });
            }
        });
        // Other tests of this process hold a few of their own.
        assert!(live() <= before + 16);
    }
}
