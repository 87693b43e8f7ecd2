//! Where a region is cut into registrations.

use super::PAGE_BYTES;

/// A region's registrations: a new one begins at each of its mappings, and inside a mapping every `chunk_bytes` from the page
/// that the mapping's first byte is in, so that all edges but a mapping's own lie between pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Chunks {
    base: u64,
    length: u64,
    chunk_bytes: u64,
    // In order; the first begins with the region.
    mappings: Box<[Mapping]>,
    count: usize,
}

/// One mapping: memory that one registration may cover.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Mapping {
    // Of its first byte, in the region.
    offset: u64,
    // Index of its first chunk.
    first: usize,
}

/// Where a byte is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) chunk: usize,
    pub(super) address: u64,
    pub(super) until_edge: u64,
}

impl Chunks {
    /// With mappings that begin at these offsets, besides the one that begins with the region.
    ///
    /// `None` if the length is zero, the chunk size not a positive number of pages, an edge is not inside the region or
    /// not after the one before it, or something overflows.
    pub(super) fn new(base: u64, length: u64, chunk_bytes: u64, edges: &[u64]) -> Option<Chunks> {
        if length == 0 || chunk_bytes == 0 || !chunk_bytes.is_multiple_of(PAGE_BYTES) {
            return None;
        }
        base.checked_add(length)?;
        let mut mappings = Vec::with_capacity(edges.len() + 1);
        let mut count = 0u64;
        let mut start = 0;
        for end in edges.iter().copied().chain([length]) {
            if end <= start || end > length {
                return None;
            }
            mappings.push(Mapping {
                offset: start,
                first: usize::try_from(count).ok()?,
            });
            let lead = (base + start) % PAGE_BYTES;
            count = count.checked_add(lead.checked_add(end - start)?.div_ceil(chunk_bytes))?;
            start = end;
        }
        Some(Chunks {
            base,
            length,
            chunk_bytes,
            mappings: mappings.into(),
            count: usize::try_from(count).ok()?,
        })
    }

    pub(super) fn base(&self) -> u64 {
        self.base
    }

    pub(super) fn length(&self) -> u64 {
        self.length
    }

    pub(super) fn chunk_bytes(&self) -> u64 {
        self.chunk_bytes
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Where mappings begin, but for the first.
    pub(super) fn edges(&self) -> impl Iterator<Item = u64> + '_ {
        self.mappings.iter().skip(1).map(|mapping| mapping.offset)
    }

    /// Which mapping a chunk is in, and where its first byte is in that mapping. The chunk exists.
    pub(super) fn in_mapping(&self, chunk: usize) -> (usize, u64) {
        let index = self.mapping_of_chunk(chunk);
        (index, self.start(chunk) - self.base - self.mappings[index].offset)
    }

    /// Address of a chunk's first byte. The chunk exists.
    pub(super) fn start(&self, chunk: usize) -> u64 {
        let mapping = self.mappings[self.mapping_of_chunk(chunk)];
        let first = self.base + mapping.offset;
        match chunk - mapping.first {
            0 => first,
            index => first - first % PAGE_BYTES + index as u64 * self.chunk_bytes,
        }
    }

    /// Bytes of a chunk. The chunk exists.
    pub(super) fn bytes(&self, chunk: usize) -> u64 {
        let end = match chunk + 1 {
            next if next < self.count => self.start(next),
            _ => self.base + self.length,
        };
        end - self.start(chunk)
    }

    #[inline]
    pub(super) fn locate(&self, offset: u64) -> Option<Place> {
        if offset >= self.length {
            return None;
        }
        if self.count == 1 {
            return Some(Place {
                chunk: 0,
                address: self.base + offset,
                until_edge: self.length - offset,
            });
        }
        let index = match self.mappings.len() {
            1 => 0,
            _ => self.mappings.partition_point(|mapping| mapping.offset <= offset) - 1,
        };
        let mapping = self.mappings[index];
        let end = self.mappings.get(index + 1).map_or(self.length, |next| next.offset);
        let from_page = (self.base + mapping.offset) % PAGE_BYTES + (offset - mapping.offset);
        let in_chunk = from_page % self.chunk_bytes;
        Some(Place {
            chunk: mapping.first + (from_page / self.chunk_bytes) as usize,
            address: self.base + offset,
            until_edge: (end - offset).min(self.chunk_bytes - in_chunk),
        })
    }

    fn mapping_of_chunk(&self, chunk: usize) -> usize {
        // The first mapping's first chunk is 0, so that there always is one.
        self.mappings.partition_point(|mapping| mapping.first <= chunk) - 1
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn edges_are_inside_and_in_order() {
        let new = |edges: &[u64]| Chunks::new(4096, 10_000, 4096, edges);
        assert!(new(&[1, 9_999]).is_some());
        for wrong in [&[0][..], &[10_000], &[5, 5], &[7, 6], &[u64::MAX]] {
            assert!(new(wrong).is_none(), "{wrong:?}");
        }
    }

    proptest! {
        /// Chunks tile the region without gap or overlap, none crosses a mapping's edge, all other edges inside it lie
        /// between pages, and every byte is found in the chunk that holds it.
        #[test]
        fn chunks_tile_the_region(
            base in 0u64..1 << 40,
            length in 1u64..1 << 20,
            pages in 1u64..40,
            edges in prop::collection::btree_set(1u64..1 << 20, 0..6),
            at in any::<prop::sample::Index>(),
        ) {
            let edges: Vec<u64> = edges.into_iter().filter(|edge| *edge < length).collect();
            let chunks = Chunks::new(base, length, pages * PAGE_BYTES, &edges).unwrap();
            prop_assert_eq!(chunks.edges().collect::<Vec<_>>(), edges.clone());
            let mut end = base;
            for chunk in 0..chunks.count() {
                prop_assert_eq!(chunks.start(chunk), end);
                prop_assert!(chunk == 0 || end % PAGE_BYTES == 0 || edges.contains(&(end - base)));
                prop_assert!((1..=pages * PAGE_BYTES).contains(&chunks.bytes(chunk)));
                let (mapping, inside) = chunks.in_mapping(chunk);
                let (from, to) = (if mapping == 0 { 0 } else { edges[mapping - 1] }, edges.get(mapping).copied().unwrap_or(length));
                prop_assert_eq!(end - base, from + inside);
                prop_assert!(from + inside + chunks.bytes(chunk) <= to);
                end += chunks.bytes(chunk);
            }
            prop_assert_eq!(end, base + length);
            let offset = at.index(length as usize) as u64;
            let place = chunks.locate(offset).unwrap();
            prop_assert_eq!(place.address, base + offset);
            prop_assert!(chunks.start(place.chunk) <= place.address);
            prop_assert_eq!(place.address + place.until_edge, chunks.start(place.chunk) + chunks.bytes(place.chunk));
            prop_assert_eq!(chunks.locate(length), None);
        }
    }
}
