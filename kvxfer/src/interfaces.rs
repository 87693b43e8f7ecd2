//! The machine's interfaces, for publishing addresses when listening on a wildcard address.

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr;

use kvxfer_core::{Error, ErrorKind, Result};

use crate::control::preference;

/// Addresses of interfaces that are up and, if `allowed` is not empty, named there; best first.
pub(crate) fn addresses(allowed: &[String]) -> Result<Vec<IpAddr>> {
    let all = list()?;
    if let Some(missing) = allowed.iter().find(|name| !all.iter().any(|(have, _)| have == *name)) {
        let mut have: Vec<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
        have.sort_unstable();
        have.dedup();
        return Err(
            Error::new(ErrorKind::InvalidArgument, format!("interfaces names {missing}"))
                .because("this machine has no such interface that is up and has an address")
                .remedy(format!("it has {}", have.join(", "))),
        );
    }
    let mut found: Vec<IpAddr> = all
        .into_iter()
        .filter(|(name, _)| allowed.is_empty() || allowed.contains(name))
        .map(|(_, address)| address)
        // A link-local address means nothing without its interface, which a peer cannot know.
        .filter(|address| match address {
            IpAddr::V4(address) => !address.is_link_local(),
            IpAddr::V6(address) => !address.is_unicast_link_local(),
        })
        .collect();
    found.sort_by_key(preference);
    Ok(found)
}

fn list() -> Result<Vec<(String, IpAddr)>> {
    let mut first: *mut libc::ifaddrs = ptr::null_mut();
    // SAFETY: getifaddrs stores a list at the pointer we pass, which is freed below with freeifaddrs and not used after.
    if unsafe { libc::getifaddrs(&mut first) } != 0 {
        return Err(Error::new(ErrorKind::ResourceExhausted, "getifaddrs")
            .because(std::io::Error::last_os_error().to_string())
            .remedy("listen on a concrete address"));
    }
    let mut found = Vec::new();
    let mut next = first;
    while !next.is_null() {
        // SAFETY: `next` is a node of the list that getifaddrs returned and that has not been freed yet.
        let node = unsafe { &*next };
        next = node.ifa_next;
        if node.ifa_flags & libc::IFF_UP as u32 == 0 || node.ifa_name.is_null() {
            continue;
        }
        // SAFETY: ifa_name is a NUL-terminated string that lives as long as the list.
        let name = unsafe { CStr::from_ptr(node.ifa_name) }.to_string_lossy().into_owned();
        if let Some(address) = ip(node.ifa_addr) {
            found.push((name, address));
        }
    }
    // SAFETY: the list was returned by getifaddrs and is freed once.
    unsafe { libc::freeifaddrs(first) };
    Ok(found)
}

fn ip(address: *const libc::sockaddr) -> Option<IpAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: a non-null ifa_addr points at a sockaddr whose family says which structure it is.
    match i32::from(unsafe { (*address).sa_family }) {
        libc::AF_INET => {
            // SAFETY: of family AF_INET, hence a sockaddr_in; read unaligned because the list promises no alignment.
            let v4 = unsafe { ptr::read_unaligned(address.cast::<libc::sockaddr_in>()) };
            Some(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: of family AF_INET6, hence a sockaddr_in6.
            let v6 = unsafe { ptr::read_unaligned(address.cast::<libc::sockaddr_in6>()) };
            Some(Ipv6Addr::from(v6.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_found_and_unknown_names_are_refused() {
        let all = addresses(&[]).unwrap();
        assert!(all.iter().any(IpAddr::is_loopback), "{all:?}");
        assert_eq!(addresses(&["lo".into()]).unwrap()[0], IpAddr::from(Ipv4Addr::LOCALHOST));
        let error = addresses(&["nonesuch0".into()]).unwrap_err();
        assert!(error.to_string().contains("lo"), "{error}");
    }
}
