//! Whether planes overlap: exactly, also where their blocks interleave, without looking at single blocks.

use super::geometry::Plane;
use crate::error::{Error, ErrorKind, Result};

/// Pairs of planes looked at, at most, so that a hostile layout cannot keep its reader busy: 16 Mi pairs take well
/// under a second.
const PAIRS_MAX: u64 = 16 << 20;

/// Finds two planes that share a byte, if there are any. Plane ends must not overflow.
pub(super) fn find_overlap(planes: &[Plane], among: &[u32]) -> Result<Option<(u32, u32)>> {
    let mut order: Vec<u32> = among.to_vec();
    order.sort_unstable_by_key(|&index| (planes[index as usize].region, planes[index as usize].base));
    let mut pairs = 0u64;
    let mut start = 0;
    while start < order.len() {
        // A cluster is a chain of planes whose spans (first byte to last byte, gaps included) overlap.
        let first = &planes[order[start] as usize];
        let mut span_end = first.end().unwrap_or(u64::MAX);
        let mut end = start + 1;
        while end < order.len() {
            let plane = &planes[order[end] as usize];
            if plane.region != first.region || plane.base >= span_end {
                break;
            }
            span_end = span_end.max(plane.end().unwrap_or(u64::MAX));
            end += 1;
        }
        if let Some(found) = overlap_in_cluster(planes, &order[start..end], &mut pairs)? {
            return Ok(Some(found));
        }
        start = end;
    }
    Ok(None)
}

fn overlap_in_cluster(planes: &[Plane], cluster: &[u32], pairs: &mut u64) -> Result<Option<(u32, u32)>> {
    if cluster.len() < 2 || disjoint_phases(planes, cluster) {
        return Ok(None);
    }
    for (position, &left) in cluster.iter().enumerate() {
        let left_end = planes[left as usize].end().unwrap_or(u64::MAX);
        for &right in &cluster[position + 1..] {
            if planes[right as usize].base >= left_end {
                break;
            }
            *pairs += 1;
            if *pairs > PAIRS_MAX {
                return Err(
                    Error::new(ErrorKind::InvalidArgument, "a layout with too many interleaved planes")
                        .because("they do not share one stride, so each pair would have to be compared")
                        .remedy("give interleaved planes of a region the same stride"),
                );
            }
            if overlap(&planes[left as usize], &planes[right as usize]) {
                return Ok(Some((left, right)));
            }
        }
    }
    Ok(None)
}

/// Whether all planes have one stride and their blocks lie apart within it: the block-major case, decided by sorting.
/// False says only that a closer look is needed.
fn disjoint_phases(planes: &[Plane], cluster: &[u32]) -> bool {
    let stride = planes[cluster[0] as usize].stride;
    let mut phases = Vec::with_capacity(cluster.len());
    for &index in cluster {
        let plane = &planes[index as usize];
        if plane.stride != stride || plane.stride == 0 {
            return false;
        }
        phases.push((plane.base % stride, plane.block_length));
    }
    phases.sort_unstable();
    let apart = phases.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0);
    let (last, first) = (phases[phases.len() - 1], phases[0]);
    apart && last.0 + last.1 <= first.0 + stride
}

/// Whether any block of one plane shares a byte with any block of the other.
fn overlap(p: &Plane, q: &Plane) -> bool {
    if p.region != q.region {
        return false;
    }
    // Block j of q begins `delta + j * q.stride` bytes after p's base. It overlaps block i of p exactly if the distance
    // from the beginning of block i lies in -q.length < distance < p.length.
    let (p_stride, q_stride) = (i128::from(p.stride.max(1)), i128::from(q.stride));
    let (p_length, q_length) = (i128::from(p.block_length), i128::from(q.block_length));
    let (p_blocks, q_blocks) = (i128::from(p.blocks), i128::from(q.blocks));
    let delta = i128::from(q.base) - i128::from(p.base);
    if p.blocks == 1 {
        return hits_window(delta, q_stride, q_blocks, 1 - q_length, p_length - 1);
    }
    // Beginning inside block i, that is 0 <= distance < p.length with i = floor(position / stride) and 0 <= i < blocks.
    hits_residue(
        delta,
        q_stride,
        q_blocks,
        p_stride,
        (0, (p_length - 1).min(p_stride - 1)),
        (0, p_blocks * p_stride - 1),
    )
    // Beginning before block i and reaching into it: residue above stride - q.length with i = floor + 1.
    || hits_residue(
        delta,
        q_stride,
        q_blocks,
        p_stride,
        ((p_stride - q_length + 1).max(0), p_stride - 1),
        (-p_stride, (p_blocks - 1) * p_stride - 1),
    )
    // A block of q longer than p's stride covers whole blocks of p: it reaches p exactly if it touches p's span.
    || (q_length >= p_stride
        && hits_window(
            delta,
            q_stride,
            q_blocks,
            1 - q_length,
            (p_blocks - 1) * p_stride + p_length - 1,
        ))
}

/// Whether some j in 0..count has low <= start + j * step <= high.
fn hits_window(start: i128, step: i128, count: i128, low: i128, high: i128) -> bool {
    indices_between(start, step, count, low, high).is_some()
}

/// The j in 0..count with low <= start + j * step <= high, as an inclusive range.
fn indices_between(start: i128, step: i128, count: i128, low: i128, high: i128) -> Option<(i128, i128)> {
    if count <= 0 || low > high {
        return None;
    }
    if step == 0 {
        return (low <= start && start <= high).then_some((0, count - 1));
    }
    let first = (low - start + step - 1).div_euclid(step).max(0);
    let last = (high - start).div_euclid(step).min(count - 1);
    (first <= last).then_some((first, last))
}

/// Whether some j in 0..count has `start + j * step` inside `within` and its residue modulo `modulus` inside `residue`
/// (both inclusive).
fn hits_residue(
    start: i128,
    step: i128,
    count: i128,
    modulus: i128,
    residue: (i128, i128),
    within: (i128, i128),
) -> bool {
    if residue.0 > residue.1 {
        return false;
    }
    let Some((first, last)) = indices_between(start, step, count, within.0, within.1) else {
        return false;
    };
    let start = (start + first * step).rem_euclid(modulus);
    // Shift so that the window of residues begins at 0.
    let start = (start - residue.0).rem_euclid(modulus);
    first_residue_at_most(start, step.rem_euclid(modulus), modulus, residue.1 - residue.0)
        .is_some_and(|j| j <= last - first)
}

/// The smallest j >= 0 with `(start + j * step) mod modulus <= high`, by the Euclidean descent on (step, modulus).
fn first_residue_at_most(start: i128, step: i128, modulus: i128, high: i128) -> Option<i128> {
    if start <= high {
        return Some(0);
    }
    if step == 0 {
        return None;
    }
    // Want the smallest j with j*step mod modulus in [low, top], where adding start wraps into 0..=high.
    let low = modulus - start;
    smallest_multiple(step, modulus, low, low + high)
}

/// The smallest j >= 0 with `low <= j * step mod modulus <= top`; 0 < low <= top < modulus, 0 < step < modulus.
fn smallest_multiple(step: i128, modulus: i128, low: i128, top: i128) -> Option<i128> {
    let first = (low + step - 1) / step;
    if first * step <= top {
        return Some(first);
    }
    // No multiple of step lies in [low, top], so step > top - low. j*step - k*modulus in [low, top] asks for the
    // smallest k with k*modulus mod step in [-top mod step, -low mod step].
    let reduced = modulus % step;
    if reduced == 0 {
        return None;
    }
    let wrapped_low = (-top).rem_euclid(step);
    let wrapped_top = (-low).rem_euclid(step);
    // [low, top] has no multiple of step, hence the negated window does not wrap around 0 and excludes it.
    let k = smallest_multiple(reduced, step, wrapped_low, wrapped_top)?;
    let j = (low + k * modulus + step - 1) / step;
    Some(j)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::geometry::{InnerOrder, PlaneKind};
    use super::*;

    fn plane(base: u64, stride: u64, block_length: u64, blocks: u32) -> Plane {
        Plane {
            layer: 0,
            group: 0,
            kind: PlaneKind::State,
            region: 0,
            base,
            stride,
            block_length,
            blocks,
            heads: None,
            order: InnerOrder::Packed,
        }
    }

    fn overlap_by_bytes(p: &Plane, q: &Plane) -> bool {
        let bytes = |plane: &Plane| -> Vec<u64> {
            (0..u64::from(plane.blocks))
                .flat_map(|block| {
                    let start = plane.base + block * plane.stride;
                    start..start + plane.block_length
                })
                .collect()
        };
        let p = bytes(p);
        bytes(q).iter().any(|byte| p.contains(byte))
    }

    fn any_plane() -> impl Strategy<Value = Plane> {
        (0u64..60, 1u64..12, 0u64..20, 1u32..7)
            .prop_map(|(base, length, gap, blocks)| plane(base, length + gap, length, blocks))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]
        #[test]
        fn pairs_agree_with_byte_sets(p in any_plane(), q in any_plane()) {
            prop_assert_eq!(overlap(&p, &q), overlap_by_bytes(&p, &q));
            prop_assert_eq!(overlap(&q, &p), overlap_by_bytes(&p, &q));
        }

        #[test]
        fn sets_agree_with_byte_sets(planes in prop::collection::vec(any_plane(), 2..6)) {
            let among: Vec<u32> = (0..planes.len() as u32).collect();
            let expected = (0..planes.len())
                .any(|i| (i + 1..planes.len()).any(|j| overlap_by_bytes(&planes[i], &planes[j])));
            prop_assert_eq!(find_overlap(&planes, &among).unwrap().is_some(), expected);
        }
    }

    #[test]
    fn interleaved_block_major_planes_are_apart() {
        let planes: Vec<Plane> = (0..160).map(|index| plane(index * 8, 1280, 8, 1000)).collect();
        let among: Vec<u32> = (0..160).collect();
        assert_eq!(find_overlap(&planes, &among).unwrap(), None);
    }

    #[test]
    fn strides_without_a_common_divisor_meet_late() {
        // Blocks of one byte at 7i and 5j + 1000003: the first meeting lies far from both beginnings.
        let p = plane(0, 7, 1, 400_000);
        let q = plane(1_000_003, 5, 1, 400_000);
        assert!(overlap(&p, &q));
        let even = plane(0, 2, 1, 1_000_000);
        let odd = plane(1_001, 6, 1, 300_000);
        assert!(!overlap(&even, &odd));
    }
}
