//! Which tokens of which layers of an offer have been released: a set of token intervals per layer.

use crate::error::{Error, ErrorKind, Result};

/// A part in the source's own numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PartRange {
    pub(super) tokens: (u32, u32),
    /// Indices in the source pool's layer list.
    pub(super) layers: (u16, u16),
    pub(super) states: bool,
}

/// What has been released so far.
#[derive(Debug)]
pub(super) struct Released {
    layers: Vec<Layer>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Layer {
    // Sorted, disjoint, not adjacent.
    tokens: Vec<(u32, u32)>,
    states: bool,
}

impl Released {
    pub(super) fn new(layers: usize) -> Released {
        Released {
            layers: vec![Layer::default(); layers],
        }
    }

    /// Releases tokens of layers. Layers beyond the last are cut off.
    pub(super) fn release(&mut self, tokens: (u32, u32), layers: (u16, u16)) -> Result<PartRange> {
        let end = usize::from(layers.1).min(self.layers.len());
        let start = usize::from(layers.0);
        if start >= end {
            return Err(
                Error::new(ErrorKind::OutOfBounds, format!("layers {}..{}", layers.0, layers.1))
                    .because(format!("the pool has {} layers", self.layers.len()))
                    .remedy("count layers in the pool's own list"),
            );
        }
        let taken = |layer: &Layer| layer.tokens.iter().any(|have| have.0 < tokens.1 && tokens.0 < have.1);
        if self.layers[start..end].iter().any(taken) {
            return Err(
                Error::new(ErrorKind::InvalidArgument, format!("tokens {}..{}", tokens.0, tokens.1))
                    .because("some of them were released before")
                    .remedy("release each token of a layer once"),
            );
        }
        for layer in &mut self.layers[start..end] {
            layer.add(tokens);
        }
        Ok(PartRange {
            tokens,
            layers: (layers.0, end as u16),
            states: false,
        })
    }

    /// Takes over what another set has released.
    pub(super) fn add(&mut self, part: &PartRange) {
        for layer in &mut self.layers[usize::from(part.layers.0)..usize::from(part.layers.1)] {
            if part.tokens.0 < part.tokens.1 {
                layer.add(part.tokens);
            }
            layer.states |= part.states;
        }
    }

    /// One past the last token released of any layer.
    pub(super) fn token_end(&self) -> u32 {
        let ends = self.layers.iter().filter_map(|layer| layer.tokens.last());
        ends.map(|tokens| tokens.1).max().unwrap_or(0)
    }

    /// Releases whatever is left below `token_end`, and all states.
    pub(super) fn release_rest(&mut self, token_end: u32) -> Vec<PartRange> {
        let rest: Vec<Layer> = self
            .layers
            .iter()
            .map(|layer| Layer {
                tokens: layer.gaps(token_end),
                states: !layer.states,
            })
            .collect();
        for layer in &mut self.layers {
            for gap in layer.gaps(token_end) {
                layer.add(gap);
            }
            layer.states = true;
        }
        ranges(&rest, token_end)
    }

    /// Everything released, in as few parts as possible.
    pub(super) fn all(&self, token_end: u32) -> Vec<PartRange> {
        ranges(&self.layers, token_end)
    }
}

impl Layer {
    fn add(&mut self, tokens: (u32, u32)) {
        let at = self.tokens.partition_point(|have| have.0 < tokens.0);
        self.tokens.insert(at, tokens);
        if at + 1 < self.tokens.len() && self.tokens[at].1 == self.tokens[at + 1].0 {
            self.tokens[at].1 = self.tokens[at + 1].1;
            self.tokens.remove(at + 1);
        }
        if at > 0 && self.tokens[at - 1].1 == self.tokens[at].0 {
            self.tokens[at - 1].1 = self.tokens[at].1;
            self.tokens.remove(at);
        }
    }

    fn gaps(&self, token_end: u32) -> Vec<(u32, u32)> {
        let mut gaps = Vec::new();
        let mut next = 0;
        for &(start, end) in &self.tokens {
            if start >= token_end {
                break;
            }
            if next < start {
                gaps.push((next, start));
            }
            next = end;
        }
        if next < token_end {
            gaps.push((next, token_end));
        }
        gaps
    }
}

/// Layers with the same tokens go together. States go with the first of a layer's intervals, or alone.
fn ranges(layers: &[Layer], token_end: u32) -> Vec<PartRange> {
    let mut parts = Vec::new();
    let mut start = 0;
    while start < layers.len() {
        let same = layers[start..]
            .iter()
            .take_while(|layer| **layer == layers[start])
            .count();
        let (first, span) = (&layers[start], (start as u16, (start + same) as u16));
        for (index, &tokens) in first.tokens.iter().enumerate() {
            parts.push(PartRange {
                tokens,
                layers: span,
                states: first.states && index == 0,
            });
        }
        if first.states && first.tokens.is_empty() {
            parts.push(PartRange {
                tokens: (token_end, token_end),
                layers: span,
                states: true,
            });
        }
        start += same;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_merged_and_the_rest_is_what_is_missing() {
        let mut released = Released::new(3);
        released.release((0, 16), (0, 3)).unwrap();
        released.release((16, 32), (0, u16::MAX)).unwrap();
        released.release((48, 64), (1, 2)).unwrap();
        assert!(released.release((20, 21), (2, 3)).is_err());
        assert!(released.release((64, 65), (3, 4)).is_err());
        let part = |tokens, layers, states| PartRange { tokens, layers, states };
        assert_eq!(
            released.all(0),
            vec![
                part((0, 32), (0, 1), false),
                part((0, 32), (1, 2), false),
                part((48, 64), (1, 2), false),
                part((0, 32), (2, 3), false),
            ]
        );
        assert_eq!(
            released.release_rest(64),
            vec![
                part((32, 64), (0, 1), true),
                part((32, 48), (1, 2), true),
                part((32, 64), (2, 3), true),
            ]
        );
        assert_eq!(released.all(64), vec![part((0, 64), (0, 3), true)]);
        assert_eq!(released.release_rest(64), vec![]);
    }

    #[test]
    fn what_another_set_released_is_taken_over_in_any_order() {
        let mut reserved = Released::new(2);
        let first = reserved.release((0, 16), (0, 2)).unwrap();
        let second = reserved.release((16, 32), (1, 2)).unwrap();
        let rest = reserved.release_rest(40);
        let mut released = Released::new(2);
        for part in [second].iter().chain(&rest).chain([&first]) {
            released.add(part);
        }
        assert_eq!(released.all(40), reserved.all(40));
        assert_eq!(released.all(40).len(), 1);
        let mut states = Released::new(1);
        states.add(&PartRange {
            tokens: (8, 8),
            layers: (0, 1),
            states: true,
        });
        assert_eq!(states.all(8).len(), 1);
        assert_eq!(states.token_end(), 0);
    }

    #[test]
    fn states_alone_are_a_part() {
        let mut released = Released::new(2);
        released.release((0, 8), (0, 2)).unwrap();
        assert_eq!(
            released.release_rest(8),
            vec![PartRange {
                tokens: (8, 8),
                layers: (0, 2),
                states: true
            }]
        );
    }
}
