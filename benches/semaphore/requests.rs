//! One request after the other through a service, bare and with a layer.

use std::convert::Infallible;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use serde::{Deserialize, Serialize};
use tower::limit::ConcurrencyLimitLayer as TowerLayer;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_semaphore::{ConcurrencyLimitLayer, Semaphore};

/// A limit that is never reached.
const LIMIT: u32 = 1000;

/// What is in front of the handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Before {
    Nothing,
    /// `tower::limit::ConcurrencyLimit`.
    Tower,
    /// The layer of this crate on the embedded backend.
    Ours,
}

/// The extensions of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Extensions {
    None,
    /// As behind Axum's router, which adds extensions.
    Some,
}

/// Serves this number of requests one by one, and reads their bodies to the end.
pub(crate) async fn answer(
    before: Before,
    extensions: Extensions,
    count: u32,
    semaphore: &Semaphore,
) {
    match before {
        Before::Nothing => through(handler(), extensions, count).await,
        Before::Tower => {
            through(TowerLayer::new(LIMIT as usize).layer(handler()), extensions, count).await;
        }
        Before::Ours => through(layer(semaphore).layer(handler()), extensions, count).await,
    }
}

fn layer(semaphore: &Semaphore) -> ConcurrencyLimitLayer {
    ConcurrencyLimitLayer::builder(semaphore, "bench").limit(LIMIT).build().expect("in range")
}

type Answer = Result<Response<Full<Bytes>>, Infallible>;

fn handler()
-> impl Service<Request<()>, Response = Response<Full<Bytes>>, Error = Infallible, Future: Send> + Clone
{
    service_fn(async |_: Request<()>| -> Answer {
        Ok(Response::new(Full::new(Bytes::from_static(b"hello"))))
    })
}

async fn through<S, B>(mut service: S, extensions: Extensions, count: u32)
where
    S: Service<Request<()>, Response = Response<B>, Error = Infallible>,
    B: http_body::Body<Data = Bytes>,
{
    for _ in 0..count {
        let ready = match service.ready().await {
            Ok(ready) => ready,
            Err(never) => match never {},
        };
        let mut request = Request::new(());
        if extensions == Extensions::Some {
            request.extensions_mut().insert("a route");
        }
        let response = match ready.call(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        };
        assert!(response.status().is_success(), "{}", response.status());
        let body = response.into_body().collect().await;
        assert!(body.is_ok_and(|body| body.to_bytes().len() == 5), "another body");
    }
}
