//! temporary
use crate::verbs::GidEntry;
/// temporary
pub fn choose(gids: &[GidEntry], _peer: Option<[u8; 16]>, wanted: Option<u32>) -> Result<GidEntry, String> {
    let v4 = |g: &&GidEntry| g.gid[10] == 0xff;
    gids.iter().find(|g| Some(g.index) == wanted).or(gids.iter().find(v4)).or(gids.first()).cloned().ok_or("none".into())
}
/// temporary
pub fn text(gid: &[u8; 16]) -> String { format!("{}", std::net::Ipv6Addr::from(*gid)) }
