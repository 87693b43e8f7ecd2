//! A small buffer per lane for what is read beyond what the lane was waiting for.

/// What is read ahead where a header is awaited, at most.
pub(crate) const LOOK_AHEAD_BYTES: usize = 8 << 10;
/// The buffer.
pub(crate) struct LookAhead {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl LookAhead {
    pub(crate) fn new() -> LookAhead {
        LookAhead {
            bytes: vec![0; LOOK_AHEAD_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.start == self.end
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    pub(crate) fn peek<const N: usize>(&self) -> Option<&[u8; N]> {
        self.bytes().first_chunk()
    }

    pub(crate) fn consume(&mut self, length: usize) {
        self.start += length;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Room for up to `max` more bytes, as a piece of a call.
    pub(crate) fn room(&mut self, max: usize) -> libc::iovec {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let room = &mut self.bytes[self.end..];
        libc::iovec {
            iov_base: room.as_mut_ptr().cast(),
            iov_len: room.len().min(max),
        }
    }

    pub(crate) fn received(&mut self, length: usize) {
        self.end += length;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_look_ahead_keeps_what_is_not_taken() {
        let mut ahead = LookAhead::new();
        let room = ahead.room(100);
        assert_eq!(room.iov_len, 100);
        ahead.bytes[..3].copy_from_slice(&[1, 2, 3]);
        ahead.received(3);
        ahead.consume(1);
        assert_eq!(ahead.room(LOOK_AHEAD_BYTES).iov_len, LOOK_AHEAD_BYTES - 2);
        assert_eq!(ahead.bytes(), [2, 3]);
        assert_eq!(ahead.peek::<3>(), None);
        assert_eq!(ahead.peek::<2>(), Some(&[2, 3]));
        ahead.consume(2);
        assert!(ahead.is_empty());
    }
}
