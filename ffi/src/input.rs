//! What the caller passes: texts, arrays, structs that carry their size, times.

use std::ffi::{c_char, c_void};
use std::mem::{MaybeUninit, size_of};
use std::slice;
use std::time::Duration;

use kvxfer::{Error, ErrorKind, Result};

/// Longest struct of a later version that is looked at.
pub(crate) const STRUCT_BYTES_MAX: usize = 4096;
/// Names of endpoints, layers, groups, models, settings.
pub(crate) const NAME_BYTES_MAX: usize = 256;
/// Values of settings, paths of files.
pub(crate) const VALUE_BYTES_MAX: usize = 4096;
/// Keys of requests.
pub(crate) const KEY_BYTES_MAX: usize = 256;
/// Messages of pushes.
pub(crate) const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// Grants and addresses in their portable forms.
pub(crate) const PORTABLE_BYTES_MAX: usize = 4 << 20;
/// Configurations and models as text.
pub(crate) const TOML_BYTES_MAX: usize = 1 << 20;

/// A struct that begins with a `uint32_t struct_size` and only grows.
///
/// # Safety
/// It is `repr(C)`, its first field is a `u32`, and any bytes are a valid value of it, all zeros being the defaults.
pub(crate) unsafe trait Grows: Copy {
    const NAME: &'static str;
    /// The sizes it has had, in order; the last is today's.
    const SIZES: &'static [usize];
}

/// `grows!(kvx_offer_options, 40)`: every size that the struct has had.
macro_rules! grows {
    ($type:ident, $($size:literal),+) => {
        // SAFETY: declared next to the struct, which is `repr(C)`, begins with `struct_size` and consists of numbers,
        // raw pointers and optional function pointers that are not called unless the caller set them.
        unsafe impl $crate::input::Grows for $type {
            const NAME: &'static str = stringify!($type);
            const SIZES: &'static [usize] = &[$($size),+];
        }
        const _: () = {
            let sizes: &[usize] = &[$($size),+];
            assert!(sizes[sizes.len() - 1] == std::mem::size_of::<$type>(), "a new size must be added to the list");
        };
    };
}
pub(crate) use grows;

/// A struct with everything at its default.
pub(crate) fn defaults<T: Grows>() -> T {
    // SAFETY: all zeros are a valid value, by the trait's contract.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// Checks a size that the caller states for a struct; `tail` says whether the bytes from an offset on are all zero.
fn check_size<T: Grows>(size: usize, tail_is_zero: impl FnOnce(usize) -> bool) -> Result<()> {
    let known = size_of::<T>();
    let refuse = |why: &str| {
        Err(
            Error::new(ErrorKind::InvalidArgument, format!("{} of {size} bytes", T::NAME))
                .because(format!("{why}; this library's has {known} bytes"))
                .remedy(
                    "set struct_size to sizeof of the struct (KVX_INIT does), and use a library as new as the header",
                ),
        )
    };
    if size <= known {
        return match T::SIZES.contains(&size) {
            true => Ok(()),
            false => refuse("no version of it had that size"),
        };
    }
    if size > STRUCT_BYTES_MAX {
        return refuse("no version of it will be that large");
    }
    match tail_is_zero(known) {
        true => Ok(()),
        false => refuse("it sets something that this library does not know"),
    }
}

/// Reads a struct. Null stands for the defaults.
///
/// # Safety
/// `pointer` is null, or points to as many bytes as its first four say.
pub(crate) unsafe fn options<T: Grows>(pointer: *const T) -> Result<T> {
    if pointer.is_null() {
        return Ok(defaults());
    }
    // SAFETY: not null, and the caller's word for the rest.
    unsafe { read(pointer.cast()) }
}

/// Reads a struct that must be there.
///
/// # Safety
/// As [`options`].
pub(crate) unsafe fn required<T: Grows>(pointer: *const T) -> Result<T> {
    if pointer.is_null() {
        return Err(null(T::NAME));
    }
    // SAFETY: not null, and the caller's word for the rest.
    unsafe { read(pointer.cast()) }
}

/// Reads an array of structs that all state the same size.
///
/// # Safety
/// `pointer` is null, or points to `count` structs of the size that the first states.
pub(crate) unsafe fn structs<T: Grows>(pointer: *const T, count: usize) -> Result<Vec<T>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    if pointer.is_null() {
        return Err(null(T::NAME));
    }
    // SAFETY: not null and at least one struct, which begins with its size.
    let size = unsafe { pointer.cast::<u32>().read_unaligned() } as usize;
    let whole = size
        .max(1)
        .checked_mul(count)
        .filter(|&whole| isize::try_from(whole).is_ok());
    if whole.is_none() {
        return Err(overflow(T::NAME, count));
    }
    let mut all = Vec::new();
    for index in 0..count {
        // SAFETY: the product was checked above; the array is the caller's word.
        let element = unsafe { pointer.byte_add(index * size) };
        // SAFETY: as above. Looked at first, so that no element is read beyond its place in the array.
        if unsafe { element.cast::<u32>().read_unaligned() } as usize != size {
            return Err(
                Error::new(ErrorKind::InvalidArgument, format!("{} number {index}", T::NAME))
                    .because("its struct_size differs from the first one's")
                    .remedy("set struct_size in every element"),
            );
        }
        // SAFETY: as above.
        let one = unsafe { read::<T>(element.cast())? };
        all.push(one);
    }
    Ok(all)
}

/// # Safety
/// `pointer` points to as many bytes as its first four say.
unsafe fn read<T: Grows>(pointer: *const u8) -> Result<T> {
    // SAFETY: a struct begins with its size.
    let size = unsafe { pointer.cast::<u32>().read_unaligned() } as usize;
    check_size::<T>(size, |known| {
        // SAFETY: `size` bytes are the caller's, and `known` is less.
        let tail = unsafe { slice::from_raw_parts(pointer.add(known), size - known) };
        tail.iter().all(|&byte| byte == 0)
    })?;
    let mut value = defaults::<T>();
    // SAFETY: both are at least as long, and any bytes are a valid value, by the trait's contract.
    unsafe {
        std::ptr::copy_nonoverlapping(
            pointer,
            std::ptr::from_mut(&mut value).cast::<u8>(),
            size.min(size_of::<T>()),
        );
    }
    Ok(value)
}

/// The size that a struct to be written states, checked.
///
/// # Safety
/// `pointer` points to at least four bytes.
pub(crate) unsafe fn stated_size<T: Grows>(pointer: *const T) -> Result<usize> {
    // SAFETY: a struct begins with its size.
    let size = unsafe { pointer.cast::<u32>().read_unaligned() } as usize;
    check_size::<T>(size, |_| true)?;
    Ok(size)
}

/// As [`stated_size`], of an element of an array to be written.
pub(crate) fn element_size<T: Grows>(size: usize) -> Result<usize> {
    check_size::<T>(size, |_| true)?;
    Ok(size)
}

/// A text of at most `max` bytes that ends with a NUL.
///
/// # Safety
/// `pointer` is null, or points to a NUL within `max + 1` readable bytes, or to that many.
pub(crate) unsafe fn text<'a>(what: &str, pointer: *const c_char, max: usize) -> Result<&'a str> {
    if pointer.is_null() {
        return Err(null(what));
    }
    // SAFETY: reads up to the NUL, and not more than `max + 1` bytes.
    let length = unsafe { libc::strnlen(pointer, max + 1) };
    if length > max {
        return Err(Error::new(ErrorKind::InvalidArgument, what.to_owned())
            .because(format!("the text has more than {max} bytes"))
            .remedy("pass a shorter text that ends with a NUL"));
    }
    // SAFETY: that many bytes were just read.
    let bytes = unsafe { slice::from_raw_parts(pointer.cast::<u8>(), length) };
    std::str::from_utf8(bytes).map_err(|error| {
        Error::new(ErrorKind::InvalidArgument, what.to_owned())
            .because(format!("it is not UTF-8 from byte {} on", error.valid_up_to()))
            .remedy("pass UTF-8")
    })
}

/// An array.
///
/// # Safety
/// `pointer` is null, or points to `count` values that nobody writes while `'a` lasts.
pub(crate) unsafe fn array<'a, T: Copy>(what: &str, pointer: *const T, count: usize) -> Result<&'a [T]> {
    check_array(what, pointer.cast_mut(), count)?;
    if count == 0 {
        return Ok(&[]);
    }
    // SAFETY: not null, aligned, of a length that fits; the caller's word for the rest.
    Ok(unsafe { slice::from_raw_parts(pointer, count) })
}

/// Bytes.
///
/// # Safety
/// As [`array()`].
pub(crate) unsafe fn bytes<'a>(what: &str, pointer: *const c_void, length: usize) -> Result<&'a [u8]> {
    // SAFETY: the caller's word.
    unsafe { array(what, pointer.cast::<u8>(), length) }
}

/// Bytes of something that is never longer than `max`: a wrong length is refused before anything is believed of it.
///
/// # Safety
/// As [`array()`].
pub(crate) unsafe fn short_bytes<'a>(
    what: &str,
    pointer: *const c_void,
    length: usize,
    max: usize,
) -> Result<&'a [u8]> {
    if length > max {
        return Err(
            Error::new(ErrorKind::InvalidArgument, format!("{what} of {length} bytes"))
                .because(format!("it has at most {max}"))
                .remedy("pass its length in bytes"),
        );
    }
    // SAFETY: the caller's word.
    unsafe { bytes(what, pointer, length) }
}

/// Whether an array can be where it is said to be.
pub(crate) fn check_array<T>(what: &str, pointer: *mut T, count: usize) -> Result<()> {
    if count == 0 {
        return Ok(());
    }
    if pointer.is_null() {
        return Err(null(what));
    }
    let length = count
        .checked_mul(size_of::<T>())
        .filter(|&length| isize::try_from(length).is_ok());
    if length.is_none_or(|length| (pointer as usize).checked_add(length).is_none()) {
        return Err(overflow(what, count));
    }
    if !pointer.is_aligned() {
        return Err(Error::new(ErrorKind::InvalidArgument, format!("{what} at {pointer:p}"))
            .because(format!("it is not aligned to {} bytes", std::mem::align_of::<T>()))
            .remedy("pass a pointer of the parameter's own type"));
    }
    Ok(())
}

/// A wait.
pub(crate) fn timeout(milliseconds: u64) -> Duration {
    match milliseconds {
        u64::MAX => Duration::MAX,
        milliseconds => Duration::from_millis(milliseconds),
    }
}

/// A deadline of an options struct: 0 is none.
pub(crate) fn deadline(milliseconds: u64) -> Option<Duration> {
    (milliseconds != 0 && milliseconds != u64::MAX).then(|| Duration::from_millis(milliseconds))
}

/// A yes or no.
pub(crate) fn flag(what: &str, value: u32) -> Result<bool> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Error::new(ErrorKind::InvalidArgument, format!("{what} = {other}"))
            .because("it is a yes or no")
            .remedy("set it to 0 or 1")),
    }
}

/// A number that has to fit a narrower type.
pub(crate) fn narrow<T: TryFrom<u32>>(what: &str, value: u32) -> Result<T> {
    T::try_from(value).map_err(|_| {
        Error::new(ErrorKind::InvalidArgument, format!("{what} = {value}"))
            .because("it is too large")
            .remedy(format!("it is a number of {} bits", size_of::<T>() * 8))
    })
}

/// A number of an enumeration that is none of its values.
pub(crate) fn no_such(what: &str, value: u32) -> Error {
    Error::new(ErrorKind::InvalidArgument, format!("{what} = {value}"))
        .because("there is no such value")
        .remedy("use one of the constants in kvxfer.h")
}

pub(crate) fn null(what: &str) -> Error {
    Error::new(ErrorKind::InvalidArgument, what.to_owned())
        .because("the pointer is null")
        .remedy("pass a pointer to it")
}

fn overflow(what: &str, count: usize) -> Error {
    Error::new(ErrorKind::InvalidArgument, format!("{what}: {count} elements"))
        .because("that many do not fit the address space")
        .remedy("pass the number of elements that the array has")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct kvx_grown {
        struct_size: u32,
        first: u32,
        second: u64,
    }
    grows!(kvx_grown, 8, 16);

    fn read_of(size: u32, bytes: &mut [u64; 4]) -> Result<kvx_grown> {
        let pointer = bytes.as_mut_ptr();
        // SAFETY: the array is as long as the largest size stated.
        unsafe {
            pointer.cast::<u32>().write(size);
            required(pointer.cast_const().cast())
        }
    }

    #[test]
    fn an_earlier_version_is_read_as_the_beginning_of_todays() {
        let mut bytes = [7 << 32, 9, 0, 0];
        assert_eq!(
            read_of(8, &mut bytes).unwrap(),
            kvx_grown {
                struct_size: 8,
                first: 7,
                second: 0
            }
        );
        assert_eq!(
            read_of(16, &mut bytes).unwrap(),
            kvx_grown {
                struct_size: 16,
                first: 7,
                second: 9
            }
        );
    }

    #[test]
    fn a_later_version_is_read_if_it_says_nothing_new() {
        let mut bytes = [7 << 32, 9, 0, 0];
        assert_eq!(read_of(24, &mut bytes).unwrap().second, 9);
        bytes[2] = 1;
        let error = read_of(24, &mut bytes).unwrap_err().to_string();
        assert!(error.contains("24 bytes") && error.contains("16 bytes"), "{error}");
    }

    #[test]
    fn other_sizes_are_refused() {
        let mut bytes = [0; 4];
        for size in [0, 4, 7, 12, 15, 4097, u32::MAX] {
            let error = read_of(size, &mut bytes).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.to_string().contains(&format!("of {size} bytes")), "{error}");
        }
    }

    #[test]
    fn an_array_of_structs_has_the_stride_that_they_state() {
        let mut bytes = [7u64 << 32 | 8, 9 << 32 | 8];
        // SAFETY: two structs of 8 bytes.
        let all = unsafe { structs::<kvx_grown>(bytes.as_ptr().cast(), 2) }.unwrap();
        assert_eq!((all[0].first, all[1].first), (7, 9));
        bytes[1] = 9 << 32 | 16;
        // SAFETY: as above; the second's larger size is not believed.
        let mixed = unsafe { structs::<kvx_grown>(bytes.as_ptr().cast(), 2) };
        assert!(mixed.unwrap_err().to_string().contains("differs"));
        // SAFETY: refused before anything but the first size is read.
        let huge = unsafe { structs::<kvx_grown>(bytes.as_ptr().cast(), usize::MAX) };
        assert_eq!(huge.unwrap_err().kind(), ErrorKind::InvalidArgument);
    }

    #[test]
    fn arrays_that_cannot_be_are_refused() {
        let one = 1u32;
        for count in [usize::MAX, usize::MAX / 4, isize::MAX as usize] {
            // SAFETY: refused before it is read.
            let refused = unsafe { array("blocks", &raw const one, count) };
            assert!(refused.unwrap_err().to_string().contains("address space"));
        }
        // SAFETY: refused before it is read.
        let odd = unsafe { array("blocks", (&raw const one).byte_add(1), 1) };
        assert!(odd.unwrap_err().to_string().contains("aligned"));
        // SAFETY: nothing is read of nothing.
        let nothing = unsafe { array("blocks", std::ptr::null::<u32>(), 0) };
        assert!(nothing.unwrap().is_empty());
    }
}
